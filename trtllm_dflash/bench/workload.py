"""What is asked: prompts of a data set as an endpoint takes them, and how they are sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.datasets import Messages, load_prompts, prompts_fingerprint
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import ConfigError

_SYNTHETIC_SEED = 20260131


@dataclass(frozen=True)
class Workload:
    """Prompts and sampling of a run or a sweep.

    Attributes:
        name: of the data set, without its folder. prompts: chat messages or token ids, in the order of use.
        params: how they are sampled. chat: whether the chat template is applied.
        forced_acceptance: acceptance length that cycles are forced to, bonus counted; None leaves them alone.
        fingerprint: SHA-256 of the prompts: results of other prompts are not comparable.
    """

    name: str
    prompts: tuple[Any, ...]
    params: SamplingParams
    chat: bool
    forced_acceptance: float | None
    fingerprint: str

    def facts(self) -> dict[str, object]:
        """For reports: what was asked, without prompts."""
        sampling = asdict(self.params)
        kept = (
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "ignore_eos",
            "stop",
            "stop_token_ids",
        )
        return {
            "dataset": self.name,
            "prompts": len(self.prompts),
            "prompts_sha256": self.fingerprint,
            "chat_template": self.chat,
            "sampling": {name: sampling[name] for name in kept},
            "forced_acceptance_length": self.forced_acceptance,
        }


def make_workload(
    dataset: Path | None,
    params: SamplingParams,
    *,
    count: int | None = None,
    chat: bool = True,
    forced_acceptance: float | None = None,
    synthetic_prompt_tokens: int | None = None,
    vocab_size: int | None = None,
) -> Workload:
    """The workload of a data set, or of random tokens.

    Args:
        dataset: JSON lines as :func:`~trtllm_dflash.bench.datasets.load_prompts` takes them; None for random tokens.
        count: prompts; None takes all of the data set, or 256 random ones.
        chat: apply the chat template; False sends the text of the last user turn.
        forced_acceptance: see :class:`Workload`.
        synthetic_prompt_tokens: length of random prompts. vocab_size: of their ids, which are drawn from its middle
            half: special tokens sit at the ends.

    Raises:
        ConfigError: neither or both kinds are given, or random tokens without forced acceptance (the acceptance
            of random tokens means nothing).
    """
    if (dataset is None) == (synthetic_prompt_tokens is None):
        raise ConfigError(
            "expected a data set or random prompts, one of them",
            hint="give --dataset FILE.jsonl; or, with --force-acceptance-length, --synthetic-prompt-tokens N",
        )
    if forced_acceptance is not None and not 1.0 <= forced_acceptance < math.inf:
        raise ConfigError(
            f"forced acceptance length is {forced_acceptance}, expected a number of at least 1: every cycle commits a "
            "token of the target's own"
        )
    if dataset is not None:
        messages = load_prompts(dataset, count)
        prompts: tuple[Any, ...] = tuple(messages if chat else [turns[-1]["content"] for turns in messages])
        return Workload(dataset.name, prompts, params, chat, forced_acceptance, prompts_fingerprint(prompts))
    if forced_acceptance is None:
        raise ConfigError(
            "random prompts without a forced acceptance length: drafts of random tokens say nothing about a drafter",
            hint="add --force-acceptance-length X, or give --dataset",
        )
    assert synthetic_prompt_tokens is not None
    if synthetic_prompt_tokens < 1 or vocab_size is None:
        raise ConfigError(
            f"random prompts of {synthetic_prompt_tokens} tokens, vocabulary {vocab_size}: expected at least one token "
            "and an engine in this process",
            hint="random prompts need --engines",
        )
    draw = random.Random(_SYNTHETIC_SEED)
    ids = range(vocab_size // 4, max(vocab_size // 4 + 1, 3 * vocab_size // 4))
    prompts = tuple(tuple(draw.choices(ids, k=synthetic_prompt_tokens)) for _ in range(count or 256))
    name = f"random tokens, {synthetic_prompt_tokens} a prompt"
    return Workload(name, prompts, params, False, forced_acceptance, prompts_fingerprint(prompts))


def encode_within(
    prompts: Sequence[Messages | str | Sequence[int]],
    encode: Callable[[Any], Sequence[int]],
    max_prompt_tokens: int,
) -> tuple[list[Sequence[int] | None], int]:
    """Token ids of each prompt, None where it is longer than ``max_prompt_tokens``; and how many were too long.

    Raises:
        ConfigError: every prompt is too long.
    """
    encoded: list[Sequence[int] | None] = []
    for prompt in prompts:
        ids = encode(prompt)
        encoded.append(ids if len(ids) <= max_prompt_tokens else None)
    dropped = sum(ids is None for ids in encoded)
    if dropped == len(encoded):
        raise ConfigError(
            f"all {dropped} prompts are longer than {max_prompt_tokens} tokens, which the engine's max_seq_len leaves "
            "beside --max-tokens",
            hint="give fewer --max-tokens, shorter prompts, or build with a larger --max-seq-len",
        )
    return encoded, dropped

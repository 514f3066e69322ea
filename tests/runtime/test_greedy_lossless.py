"""Greedy output is the target's own, with and without speculation, whatever the batch, prompt length or chunking."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from reference_decoding import token_logprobs
from tiny_pair import ACTIVE, VOCAB_SIZE
from transformers import PreTrainedModel

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.llm import LLM

PAIRS = ("llama-v2", "qwen3-v1", "qwen3-v2", "llama-v1")


def _greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)


def _prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids that end in a likely token."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(n - 1)] + [draw.choice(ACTIVE)] for n in lengths]


def _transformers_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
        )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("speculation", ["on", "off"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", PAIRS)
def test_equals_transformers(
    tiny_pairs: Callable, tiny_llms: Callable, name: str, batch: int, speculation: str
) -> None:
    llm = tiny_llms(name, speculation=speculation)
    prompts = _prompts([3, 31, 64, 17, 90, 1, 33, 8], seed=batch)
    groups = [prompts] if batch == 8 else [[prompt] for prompt in prompts]
    outputs = [output for group in groups for output in llm.generate(group, _greedy(40))]
    expected = [_transformers_greedy(tiny_pairs(name).model, prompt, 40) for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected
    if speculation == "on":
        # Otherwise nothing was proved about accepted drafts.
        assert sum(output.metrics.accepted_tokens for output in outputs) > 20


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_every_prompt_length(tiny_pairs: Callable, tiny_llms: Callable, name: str) -> None:
    """Lengths around page and chunk ends are where special cases hide."""
    model, prompts = tiny_pairs(name).model, _prompts(range(1, 71), seed=1)
    outputs = tiny_llms(name).generate(prompts, _greedy(20, logprobs=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = token_logprobs(model, prompt, output.token_ids)
        assert output.token_ids == tuple(expected.argmax(-1).tolist()), f"prompt of {len(prompt)} tokens"
        assert output.logprobs is not None
        found = torch.tensor([entry.logprob for entry in output.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, expected.max(-1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_chunked_prefill_changes_nothing(tiny_llms: Callable, name: str) -> None:
    prompts = _prompts([5, 7, 8, 40, 61, 100], seed=2)
    whole = tiny_llms(name, limits={"max_num_tokens": 512}).generate(prompts, _greedy(30, logprobs=3))
    chunked = tiny_llms(name, limits={"max_num_tokens": 7}).generate(prompts, _greedy(30, logprobs=3))
    for one, other in zip(whole, chunked, strict=True):
        assert one.token_ids == other.token_ids
        # Features of every chunk must reach the drafter: the same drafts are accepted.
        assert one.metrics.accepted_histogram == other.metrics.accepted_histogram
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_smaller_block_than_built(tiny_llms: Callable, block_size: int) -> None:
    prompts = _prompts([4, 30, 65], seed=3)
    small = tiny_llms("llama-v2", block_size=block_size)
    plain = tiny_llms("llama-v2", speculation="off")
    assert small.block_size == block_size
    outputs = small.generate(prompts, _greedy(40))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, _greedy(40))]
    assert all(len(o.metrics.accepted_histogram) == block_size for o in outputs)
    assert sum(o.metrics.accepted_tokens for o in outputs) > 0


@pytest.mark.parametrize("text", ["", "a"])
def test_shortest_prompts(tiny_llms: Callable, text: str) -> None:
    """BOS alone, BOS and one token, one token without BOS."""
    llm, plain = tiny_llms("llama-v2"), tiny_llms("llama-v2", speculation="off")
    ids = llm.encode(text)
    assert len(ids) == 1 + len(text)
    for prompt in (text, list(ids[-1:])):
        assert llm.generate(prompt, _greedy(24))[0].token_ids == plain.generate(prompt, _greedy(24))[0].token_ids


def test_acceptance_does_not_depend_on_the_batch(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    prompts = _prompts([2 + 5 * n for n in range(16)], seed=4)
    together = llm.generate(prompts, _greedy(50))
    alone = [llm.generate(prompt, _greedy(50))[0] for prompt in prompts]
    assert [o.metrics.accepted_histogram for o in together] == [o.metrics.accepted_histogram for o in alone]


DEMO_CHATS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Write one sentence about rain in Kyoto.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
)


@pytest.fixture(scope="module")
def demo_prompts(demo_llm: LLM) -> list[tuple[int, ...]]:
    return [demo_llm.encode([{"role": "user", "content": chat}]) for chat in DEMO_CHATS]


@pytest.fixture(scope="module")
def demo_expected(demo_model: PreTrainedModel, demo_prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [_transformers_greedy(demo_model, prompt, 40) for prompt in demo_prompts]


def test_demo_pair_equals_transformers(
    demo_llm: LLM, demo_prompts: list[tuple[int, ...]], demo_expected: list[tuple[int, ...]]
) -> None:
    outputs = demo_llm.generate([list(p) for p in demo_prompts], _greedy(40))
    assert [output.token_ids for output in outputs] == demo_expected
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    assert 1 + accepted / sum(output.metrics.cycles for output in outputs) > 2


def test_demo_pair_accepts_what_the_reference_accepts(
    demo_llm: LLM,
    demo_pair: object,
    demo_model: PreTrainedModel,
    demo_prompts: list[tuple[int, ...]],
) -> None:
    """Tokens per cycle equal those of the public reference loop, cycle by cycle as a histogram."""
    reference = pytest.importorskip("dflash.model")
    drafter = reference.DFlash2DraftModel.from_pretrained(demo_pair.drafter, dtype=torch.float32).eval()  # type: ignore[attr-defined]
    for prompt, output in zip(
        demo_prompts, demo_llm.generate([list(p) for p in demo_prompts], _greedy(32)), strict=True
    ):
        lengths = _reference_acceptance(reference, drafter, demo_model, prompt, 32)
        histogram = [lengths.count(committed) for committed in range(1, demo_llm.block_size + 1)]
        assert list(output.metrics.accepted_histogram) == histogram


def _reference_acceptance(
    reference: object, drafter: object, model: PreTrainedModel, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """The reference's committed tokens per cycle; its timer needs a GPU, so the clock is replaced."""
    original = reference._cuda_time  # type: ignore[attr-defined]
    reference._cuda_time = lambda: 0.0  # type: ignore[attr-defined]
    try:
        result = reference.dflash_generate(  # type: ignore[attr-defined]
            drafter,
            target=model,
            input_ids=torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            stop_token_ids=None,
            return_stats=True,
        )
    finally:
        reference._cuda_time = original  # type: ignore[attr-defined]
    return list(result.acceptance_lengths)

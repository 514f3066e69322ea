"""The same greedy requests on two engines: tokens, acceptance, speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import RequestOutput
from trtllm_dflash.runtime.prompting import Prompt

BATCH = 8


@dataclass(frozen=True)
class Generated:
    """Greedy outputs of one engine with speculation on or off.

    Attributes:
        outputs: one per prompt, with the two most probable tokens at each position.
        tok_s: output tokens per second by requests at a time (1 and ``BATCH``).
    """

    outputs: tuple[RequestOutput, ...]
    tok_s: dict[int, float]

    @property
    def acceptance_length(self) -> float | None:
        """Pooled, the bonus counted; None without a cycle."""
        cycles = sum(output.metrics.cycles for output in self.outputs)
        accepted = sum(output.metrics.accepted_tokens for output in self.outputs)
        return (accepted + cycles) / cycles if cycles else None

    def acceptance_error(self) -> float:
        """Standard error of the acceptance length, from the spread of cycles."""
        histogram = [output.metrics.accepted_histogram for output in self.outputs]
        kept = [j for one in histogram for j, count in enumerate(one) for _ in range(count)]
        return statistics.stdev(kept) / math.sqrt(len(kept)) if len(kept) > 1 else math.inf


@dataclass(frozen=True)
class Agreement:
    """How the tokens of two engines compare.

    Attributes:
        requests, identical: counted.
        ties: requests that part where the reference's two best tokens are as good as equal.
        unexplained: requests that part elsewhere. first_gap: the smallest gap, in nats, of an unexplained one; None
            without any.
    """

    requests: int
    identical: int
    ties: int
    unexplained: int
    first_gap: float | None


def generate_greedily(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> Generated:
    """Outputs (one request at a time, with logprobs), then speed without logprobs at 1 and ``BATCH`` at a time."""
    timed = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    told = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
    outputs = tuple(llm.generate([prompt], told)[0] for prompt in prompts)
    rates = {}
    for size in (1, BATCH):
        tokens, begun = 0, time.perf_counter()
        for first in range(0, len(prompts), size):
            done = llm.generate(list(prompts[first : first + size]), timed)
            tokens += sum(len(output.token_ids) for output in done)
        rates[size] = tokens / (time.perf_counter() - begun)
    return Generated(outputs, rates)


def agreement(found: Generated, expected: Generated, tie_nats: float) -> Agreement:
    """Compare tokens; a request may part from the reference where its two best tokens are within ``tie_nats``."""
    identical = ties = 0
    gaps = []
    for a, b in zip(found.outputs, expected.outputs, strict=True):
        if a.token_ids == b.token_ids:
            identical += 1
            continue
        gap = _gap(b, _first_difference(a.token_ids, b.token_ids))
        if gap is not None and gap <= tie_nats:
            ties += 1
        else:
            gaps.append(math.inf if gap is None else gap)
    return Agreement(len(found.outputs), identical, ties, len(gaps), min(gaps, default=None))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gap(output: RequestOutput, place: int) -> float | None:
    """Nats between the two best tokens at ``place``; None beyond the end."""
    if output.logprobs is None or place >= len(output.logprobs):
        return None
    best = output.logprobs[place].top
    return best[0][1] - best[1][1] if len(best) > 1 else None

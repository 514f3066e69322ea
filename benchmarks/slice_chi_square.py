"""Sampled output is the target's own distribution: chi-square tests of real cycles on the demo pair.

Many slots hold the same context; each cycle drafts, verifies and accepts with fresh seeds, then every slot is set back.
The token at position j of a cycle, given the tokens before it, must have the probabilities that transformers gives for
that prefix. Counts are compared prefix by prefix and pooled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel

from benchmarks.slice_greedy import load_reference_target
from trtllm_dflash import SamplingParams
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.runtime.cycle import draft_verify_cycle
from trtllm_dflash.runtime.outputs import OutputChunk
from trtllm_dflash.runtime.prefill import PrefillChunk, PrefillRunner
from trtllm_dflash.runtime.prompting import PromptEncoder
from trtllm_dflash.runtime.request import Request, RequestSpec
from trtllm_dflash.runtime.slots import SamplingMode, SlotState
from trtllm_dflash.runtime.text import TextStream

SLOTS = 16
POSITIONS = 3
PREFIX_DRAWS = 200
"""Prefixes with fewer draws are not tested."""
_QUESTION = "A shop sells pens at 3 dollars and books at 12 dollars. How much do 4 pens and 2 books cost?"
_ANSWER_START = "To solve this problem, we need to break it down into manageable parts. First, let's calculate"
_SETTINGS = {
    "temperature": SamplingParams(max_tokens=64, temperature=1.0),
    "filtered": SamplingParams(max_tokens=64, temperature=1.0, top_k=50, top_p=0.97, min_p=0.002),
}


def chi_square_figures(engines: dict[int, Path], *, draws: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``chi_square_min_p`` over drafters, settings and positions; at least ``draws`` tested draws at each position."""
    target = load_reference_target()
    results: dict[str, Any] = {}
    for version, path in engines.items():
        for name, params in _SETTINGS.items():
            counts, context = count_cycles(path, params, draws)
            for position, result in test_positions(counts, context, params, target).items():
                results[f"v{version}_{name}_position_{position}"] = result
                print(f"v{version} {name} position {position}: {result}", flush=True)
    return {"chi_square_min_p": min(result["p"] for result in results.values())}, {"tests": results}


Prefix = tuple[int, ...]


@torch.inference_mode()
def count_cycles(
    engines: Path, params: SamplingParams, draws: int
) -> tuple[dict[Prefix, Counter[int]], tuple[int, ...]]:
    """Run cycles until position 3 has ``draws`` draws; counts of the next token by the prefix inside the cycle.

    Returns the counts and the context (prompt and first token) that every cycle starts from.
    """
    session = load_session(engines, device="cpu")
    encoder = PromptEncoder(engines / "tokenizer", session.target_config.vocab_size)
    prompt = encoder.encode([{"role": "user", "content": _QUESTION}]) + encoder.encode(_ANSWER_START)
    page_tokens = session.limits.page_tokens
    pages_each = (len(prompt) + 80) // page_tokens + 1
    session.allocate_caches(SLOTS * pages_each)
    state = SlotState(
        SLOTS, 256 + len(prompt), pages_each, SLOTS * pages_each, session.target_config.vocab_size, session.device
    )
    mode = SamplingMode.of(params)
    requests = []
    for slot in range(SLOTS):
        spec = RequestSpec(f"slot{slot}", prompt[:-1], params, mode, 64, (), (), seed=1)
        request = Request(spec, TextStream(encoder.backend, (), include_stop=False), _ignore, 8, slot=slot)
        pages = list(range(slot * pages_each, (slot + 1) * pages_each))
        state.start(slot, spec.prompt, params, seed=1, max_output_tokens=64, stop_ids=(), bad_words=(), pages=pages)
        requests.append(request)
    PrefillRunner(session, state).run([PrefillChunk(request, 0, len(prompt) - 1) for request in requests])
    slots = torch.arange(SLOTS)
    counts: dict[Prefix, Counter[int]] = defaultdict(Counter)
    seed = 0
    while _testable_draws(counts, POSITIONS - 1) < draws:
        # Every cycle starts from the same anchor: the prompt's last token.
        state.anchors.fill_(prompt[-1])
        state.context_lengths.fill_(len(prompt) - 1)
        state.remaining.fill_(63)
        state.generated.fill_(1)
        state.seeds.copy_(torch.arange(seed, seed + SLOTS))
        seed += SLOTS
        result = draft_verify_cycle(session, state, slots, POSITIONS + 1, pages_each, mode)
        for tokens, produced in zip(result.tokens.tolist(), result.produced.tolist(), strict=True):
            for position in range(min(produced, POSITIONS)):
                counts[tuple(tokens[:position])][tokens[position]] += 1
    session.close()
    return counts, prompt


def test_positions(
    counts: dict[Prefix, Counter[int]], context: tuple[int, ...], params: SamplingParams, target: PreTrainedModel
) -> dict[int, dict[str, float]]:
    """One pooled chi-square test per position over the prefixes with enough draws."""
    results = {}
    for position in range(POSITIONS):
        statistic, freedom, tested = 0.0, 0, 0
        for prefix, row in counts.items():
            total = sum(row.values())
            if len(prefix) != position or total < PREFIX_DRAWS:
                continue
            exact = exact_probabilities(target, (*context, *prefix), params)
            expected = exact * total
            common = np.flatnonzero(expected >= 10)
            observed = np.array([row[token] for token in common], dtype=float)
            rest_observed, rest_expected = total - observed.sum(), total - expected[common].sum()
            if any(exact[token] == 0 for token in row):
                statistic = float("inf")
            statistic += float(((observed - expected[common]) ** 2 / expected[common]).sum())
            freedom += len(common) - 1
            if rest_expected >= 5:
                statistic += float((rest_observed - rest_expected) ** 2 / rest_expected)
                freedom += 1
            tested += total
        if freedom == 0:
            raise ValueError(f"position {position + 1} has one possible token: choose another context")
        results[position + 1] = {
            "p": float(stats.chi2.sf(statistic, freedom)),
            "chi_square": statistic,
            "degrees_of_freedom": freedom,
            "draws": tested,
        }
    return results


@torch.inference_mode()
def exact_probabilities(target: PreTrainedModel, ids: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The target's next-token distribution after ``ids`` with the parameters applied, written independently."""
    logits = target(torch.tensor([ids])).logits[0, -1].double().numpy() / params.temperature
    order = np.argsort(-logits, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    weights = np.exp(logits[kept] - logits[kept[0]])
    weights /= weights.sum()
    if params.top_p < 1:
        size = int(np.searchsorted(np.cumsum(weights), params.top_p)) + 1
        kept, weights = kept[:size], weights[:size]
    survivors = weights >= params.min_p * weights[0]
    kept, weights = kept[survivors], weights[survivors]
    probabilities = np.zeros_like(logits)
    probabilities[kept] = weights / weights.sum()
    return probabilities


def _testable_draws(counts: dict[Prefix, Counter[int]], position: int) -> int:
    totals = (sum(row.values()) for prefix, row in counts.items() if len(prefix) == position)
    return sum(total for total in totals if total >= PREFIX_DRAWS)


def _ignore(chunk: OutputChunk) -> None:
    """Nobody listens to the prefill's tokens."""

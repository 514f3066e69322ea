"""Sampled output has exactly the target's distribution: chi-square against probabilities that are enumerated.

Seeds are fixed, so these tests cannot flicker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from reference_decoding import output_distribution
from scipy.stats import chisquare
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.llm import LLM

DRAWS = 4000
# The first token comes from the prefill; tokens 1 .. 3 from draft-verify cycles.
LENGTH = 4
WIDE = {"max_batch_size": 256, "max_seq_len": 64, "max_num_tokens": 4096}
PROMPT = (0, 80, 81, 82, ACTIVE[3])

TEMPERATURE = SamplingParams(temperature=1.3)
FILTERED = SamplingParams(temperature=0.9, top_k=7, top_p=0.85, min_p=0.04)
# Top-k before top-p, or the other way round, gives different supports here.
ORDERED = SamplingParams(temperature=1.6, top_k=4, top_p=0.7)
PENALISED = SamplingParams(
    temperature=1.0,
    repetition_penalty=1.4,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    logit_bias={ACTIVE[1]: -1.5, ACTIVE[4]: 2.0, ACTIVE[6]: -100.0},
)


def _draw(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[tuple[int, ...]]:
    each = [
        SamplingParams(**{**vars(params), "max_tokens": LENGTH, "ignore_eos": True, "seed": seed})
        for seed in range(DRAWS)
    ]
    outputs = llm.generate([list(prompt)] * DRAWS, each)
    if llm.block_size > 1:
        drafted = sum(output.metrics.drafted_tokens for output in outputs)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        assert 100 < accepted < drafted - 100, "both acceptance and rejection must have happened"
    return [output.token_ids for output in outputs]


def _p_value(draws: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's test; cells that expect fewer than five draws are merged."""
    found = Counter(draws)
    large = [cell for cell, p in expected.items() if p * len(draws) >= 5]
    observed = [found[cell] for cell in large]
    wanted = [expected[cell] * len(draws) for cell in large]
    rest = len(draws) - sum(wanted)
    if rest >= 5:
        observed.append(len(draws) - sum(observed))
        wanted.append(rest)
    else:
        # What is left over is too rare to be a cell of its own: it joins the rarest one.
        observed[-1] += len(draws) - sum(observed)
        wanted[-1] += rest
    return float(chisquare(observed, wanted).pvalue)


def _marginal(expected: dict[tuple[int, ...], float], columns: Sequence[int]) -> dict[tuple[int, ...], float]:
    marginal: Counter[tuple[int, ...]] = Counter()
    for output, p in expected.items():
        marginal[tuple(output[column] for column in columns)] += p  # type: ignore[assignment]
    return dict(sorted(marginal.items(), key=lambda item: -item[1]))


@pytest.mark.parametrize("columns", [(1,), (2,), (3,), (1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "params", [TEMPERATURE, FILTERED, ORDERED, PENALISED], ids=["T", "filtered", "order", "penalised"]
)
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_distribution(samples: Callable, name: str, params: SamplingParams, columns: tuple[int, ...]) -> None:
    draws, expected = samples(name, params)
    marginal = _marginal(expected, columns)
    assert _p_value([tuple(draw[column] for column in columns) for draw in draws], marginal) > 1e-3


@pytest.mark.parametrize("params", [FILTERED, ORDERED], ids=["filtered", "order"])
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_nothing_outside_the_support(samples: Callable, name: str, params: SamplingParams) -> None:
    draws, expected = samples(name, params)
    assert set(draws) <= set(expected)


@pytest.fixture(scope="module")
def samples(tiny_pairs: Callable, tiny_llms: Callable) -> Callable:
    """Draws of a pair under parameters, and the exact distribution of outputs; computed once each."""
    known: dict[tuple[str, int], tuple[list[tuple[int, ...]], dict[tuple[int, ...], float]]] = {}

    def of(name: str, params: SamplingParams) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], float]]:
        key = (name, id(params))
        if key not in known:
            llm = tiny_llms(name, limits=WIDE)
            exact = output_distribution(tiny_pairs(name).model, PROMPT, params, LENGTH)
            known[key] = (_draw(llm, params), exact)
        return known[key]

    return of


def test_walk_is_accepted_at_its_realised_probability(tiny_llms: Callable) -> None:
    """Drawing twice with other seeds gives other tokens but the same acceptance, within four standard errors."""
    llm = tiny_llms("llama-v2", limits=WIDE)
    rates = []
    for first in (10_000, 20_000):
        each = [SamplingParams(temperature=1.0, max_tokens=13, ignore_eos=True, seed=first + n) for n in range(400)]
        outputs = llm.generate([list(PROMPT)] * 400, each)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        rates.append(accepted / sum(output.metrics.cycles for output in outputs))
    # Kept drafts per cycle lie in [0, 5] with a deviation below 2; 400 requests run at least 1,000 cycles.
    assert abs(rates[0] - rates[1]) < 4 * 2 * (2 / 1000) ** 0.5


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_sampling_keeps_most_of_the_acceptance(tiny_llms: Callable, name: str) -> None:
    """The output would be right with any proposals; these must stay worth verifying when they are drawn."""
    llm = tiny_llms(name)
    lengths = []
    for temperature in (0.0, 0.3):
        each = [SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=n) for n in range(32)]
        metrics = [output.metrics for output in llm.generate(["hello d", "abc", "x y z", "日本é"] * 8, each)]
        lengths.append(sum(m.completion_tokens - 1 for m in metrics) / sum(m.cycles for m in metrics))
    greedy, sampled = lengths
    assert sampled >= 0.7 * greedy
    assert greedy > 1.5

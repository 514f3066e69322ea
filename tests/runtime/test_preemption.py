"""Too few pages: requests give theirs up, go on later, and nobody can tell from the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from collected_streams import Streams
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM

PLAIN = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
EVERYTHING = replace(
    PLAIN,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    min_tokens=60,
    stop_token_ids=(ACTIVE[9],),
    bad_words=("ab",),
    logit_bias={ACTIVE[1]: 1.5},
    stop=("zzzz",),
    logprobs=2,
)


def _load(count: int, params: SamplingParams, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [[draw.choice(ACTIVE) for _ in range(draw.randrange(1, 80))] for _ in range(count)]
    each = [
        replace(params, seed=n, max_tokens=draw.randrange(60, 110), temperature=params.temperature if n % 3 else 0.0)
        for n in range(count)
    ]
    return prompts, each


@pytest.mark.fault("out of pages")
@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v1"])
@pytest.mark.parametrize(
    ("params", "prefix_cache", "overlap"),
    [
        (replace(PLAIN, temperature=1.0, top_p=0.9), True, True),
        (PLAIN, False, False),
        (replace(EVERYTHING, temperature=0.8), False, True),
    ],
    ids=["sampled", "greedy", "everything"],
)
def test_preempted_output_is_the_same(
    tiny_engines: Callable, tiny_llms: Callable, pair: str, params: SamplingParams, prefix_cache: bool, overlap: bool
) -> None:
    """Greedy and sampled; sampled because a resumed request has the anchor, hence the draws, of the last cycle."""
    prompts, each = _load(14, params, seed=3)
    expected = tiny_llms(pair).generate(prompts, each)
    options = EngineOptions(overlap=overlap)
    with LLM(
        tiny_engines(pair), device="cpu", kv_cache_tokens=32 * 10, prefix_cache=prefix_cache, options=options
    ) as llm:
        outputs = llm.generate(prompts, each)
        stats = llm.stats()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.text for o in outputs] == [o.text for o in expected]
    assert [o.metrics.accepted_histogram for o in outputs] == [o.metrics.accepted_histogram for o in expected]
    assert stats.counters["preemptions"] >= 1
    assert sum(o.metrics.preemptions for o in outputs) == stats.counters["preemptions"]
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
    if params.logprobs:
        for output, reference in zip(outputs, expected, strict=True):
            assert [p.logprob for p in output.logprobs or ()] == pytest.approx(
                [p.logprob for p in reference.logprobs or ()], abs=1e-3
            )


def test_streams_of_preempted_requests_repeat_and_lose_nothing(tiny_engines: Callable, tiny_llms: Callable) -> None:
    prompts, each = _load(12, replace(PLAIN, temperature=1.0), seed=5)
    expected = tiny_llms("llama-v2").generate(prompts, each)
    streams = Streams()
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=32 * 10) as llm:
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            llm.submit(prompt, params, streams.add, request_id=f"{number}", priority=number % 3)
        streams.wait(12)
        assert llm.stats().counters["preemptions"] > 0
    for number, output in enumerate(expected):
        assert streams.text[f"{number}"] == output.text
        assert streams.tokens[f"{number}"] == output.token_ids


@pytest.mark.fault("client gone")
def test_cancelling_preempted_requests(tiny_engines: Callable, tiny_llms: Callable) -> None:
    """Cancelled at random moments while pages are scarce; the others' texts are their own, and every page is back."""
    prompts, each = _load(60, replace(PLAIN, temperature=1.0), seed=7)
    draw, streams = random.Random(7), Streams()
    options = EngineOptions(overlap=True)
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=32 * 12, options=options) as llm:
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            llm.submit(prompt, params, streams.add, request_id=f"{number}")
        victims = draw.sample(range(60), 30)
        for victim in victims:
            streams.wait_for_progress()
            llm.cancel(f"{victim}")
        streams.wait(60, timeout_s=120)
        stats = llm.stats()
        assert stats.counters["preemptions"] > 0
        assert stats.pages_used == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    kept = [n for n in range(60) if streams.last[f"{n}"].finish_reason != "cancelled"]
    assert 30 <= len(kept) < 60
    expected = tiny_llms("llama-v2").generate([prompts[n] for n in kept], [each[n] for n in kept])
    assert [streams.tokens[f"{n}"] for n in kept] == [output.token_ids for output in expected]

"""Cycles launched before the one before them was read: same outputs, same counts, nothing leaked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import RequestOutput

EngineFactory = Callable[..., Path]

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
CASES = {
    "greedy": GREEDY,
    "one token": replace(GREEDY, max_tokens=1),
    "two tokens": replace(GREEDY, max_tokens=2),
    "stop string": replace(GREEDY, stop=("b", "\n")),
    "stop id": replace(GREEDY, stop_token_ids=(ACTIVE[3],)),
    "sampled": SamplingParams(temperature=1.1, top_k=9, top_p=0.95, seed=5, max_tokens=40),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, seed=6, max_tokens=40),
    "bad words": replace(GREEDY, bad_words=("a", "cd"), min_tokens=9),
    "logprobs": replace(GREEDY, logprobs=3),
}


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.choice(ACTIVE[1:]) for _ in range(draw.randrange(1, 90))] for _ in range(count)]


def _outputs(engines: Path, params: Any, overlap: bool, count: int) -> list[RequestOutput]:
    with LLM(engines, device="cpu", options=EngineOptions(overlap=overlap), kv_cache_tokens=2048) as llm:
        outputs = llm.generate(_prompts(count), params)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.counters["output_tokens"] == sum(len(output.token_ids) for output in outputs)
    return outputs


def _facts(output: RequestOutput) -> tuple[Any, ...]:
    metrics = output.metrics
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.logprobs,
        metrics.cycles,
        metrics.drafted_tokens,
        metrics.accepted_histogram,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v1"])
def test_overlap_changes_no_output_and_no_count(tiny_engines: EngineFactory, pair: str, case: str) -> None:
    engines, params = tiny_engines(pair), CASES[case]
    plain, overlapped = (_outputs(engines, params, overlap, 6) for overlap in (False, True))
    assert [_facts(output) for output in overlapped] == [_facts(output) for output in plain]


def test_more_requests_than_slots(tiny_engines: EngineFactory) -> None:
    """Slots and pages go from an ended request to the next one while a cycle of the ended one is still in flight."""
    engines = tiny_engines("llama-v2", max_batch_size=3)
    params = [replace(list(CASES.values())[n % len(CASES)], max_tokens=9 + n % 17) for n in range(40)]
    plain, overlapped = (_outputs(engines, params, overlap, 40) for overlap in (False, True))
    assert [output.token_ids for output in overlapped] == [output.token_ids for output in plain]


def test_cancelling_with_a_cycle_in_flight_leaks_nothing(tiny_engines: EngineFactory) -> None:
    params = replace(GREEDY, max_tokens=200, ignore_eos=True)
    with LLM(tiny_engines("llama-v2"), device="cpu", options=EngineOptions(overlap=True)) as llm:
        alone = llm.generate(_prompts(1), params)[0]
        victims: list[str] = []

        def cancel_others(index: int, chunk: Any) -> None:
            if index == 0:
                while victims:
                    llm.cancel(victims.pop())

        ended = []
        for prompt in _prompts(5)[1:]:
            victims.append(llm.submit(prompt, params, lambda chunk: ended.append(chunk.finish_reason)))
        assert llm.generate(_prompts(1), params, on_chunk=cancel_others)[0].token_ids == alone.token_ids
        assert [reason for reason in ended if reason is not None] == ["cancelled"] * 4
        assert llm.stats().pages_used == 0


def test_a_trace_has_every_cycle_and_the_time_between_them(tiny_engines: EngineFactory) -> None:
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=2048) as llm:
        with llm.profiler.traced() as trace:
            started = time.perf_counter()
            output = llm.generate(_prompts(1), GREEDY)[0]
            elapsed = time.perf_counter() - started
        llm.generate(_prompts(1), GREEDY)
        spans = trace.spans()

    assert len(spans.busy) >= output.metrics.cycles > 1  # a cycle may be launched that turns out not to be needed
    assert len(spans.idle) == len(spans.busy) - 1
    assert min(*spans.busy, *spans.idle) > 0
    assert sum(spans.busy) + sum(spans.idle) < elapsed

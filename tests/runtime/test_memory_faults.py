"""Out of memory inside a pass, and queues, deadlines and pages at their limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import MethodType

import pytest
import torch
from collected_streams import Streams
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.session import TargetInputs, TargetOutputs
from trtllm_dflash.errors import EngineError, QueueFullError
from trtllm_dflash.runtime import cycle_runner
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def _no_memory_for(llm: LLM, too_many_tokens: int) -> None:
    """A prefill pass of that many tokens or more runs out of memory, as an allocator says it."""
    session, real = llm.session, llm.session.target

    def target(self: object, inputs: TargetInputs) -> TargetOutputs:
        if inputs.queries_per_request is None and inputs.input_ids.shape[0] >= too_many_tokens:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")
        return real(inputs)

    session.target = MethodType(target, session)  # type: ignore[method-assign]


@pytest.mark.fault("out of memory in prefill")
def test_out_of_memory_in_a_shared_prefill_pass(tiny_engines: Callable, tiny_llms: Callable) -> None:
    """The pass is run again request by request; who alone is too large fails, and says why."""
    prompts = [[ACTIVE[n % 16]] * length for n, length in enumerate((20, 15, 60, 10))]
    expected = tiny_llms("llama-v2", limits={"max_num_tokens": 256}).generate(prompts, GREEDY)
    with LLM(tiny_engines("llama-v2", max_num_tokens=256), device="cpu") as llm:
        _no_memory_for(llm, 40)
        outputs = llm.generate(prompts, GREEDY)
        assert [o.finish_reason for o in outputs] == ["length", "length", "error", "length"]
        assert "OutOfMemoryError" in (outputs[2].error or "")
        for index in (0, 1, 3):
            assert outputs[index].token_ids == expected[index].token_ids
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.counters["requests_failed"] == 1
        assert llm.generate(prompts[0], GREEDY)[0].token_ids == expected[0].token_ids


@pytest.mark.fault("out of memory in prefill")
def test_an_engine_without_memory_for_a_prefill_does_not_start(
    tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills of every size are recorded before anything is served, the largest first."""
    engines = tiny_engines("llama-v2")
    session = load_session(engines, device="cpu")

    def target(self: object, inputs: TargetInputs) -> TargetOutputs:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")

    class Pool:
        def capture(self, function: Callable[[], object]) -> object:
            return function()

    monkeypatch.setattr(session, "target", MethodType(target, session))
    monkeypatch.setattr(session, "uses_kernels", True)
    monkeypatch.setattr(cycle_runner.CycleRunner, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(cycle_runner.CycleRunner, "warm_up", lambda *_: None)
    monkeypatch.setattr(cycle_runner.CycleRunner, "pool", Pool())
    with pytest.raises(EngineError, match="no memory left for a prefill of 64 tokens") as caught:
        LLM.of_session(session, engines / "tokenizer", options=EngineOptions(graphs=True))
    assert "--max-num-tokens" in (caught.value.hint or "")


@pytest.mark.fault("a result is lost")
@pytest.mark.parametrize("number", [0, 4], ids=["of a prefill", "of a cycle"])
def test_a_pass_whose_result_is_lost_is_not_run_again(
    tiny_engines: Callable, tiny_llms: Callable, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It has moved its requests forward: they end, and nobody gets tokens with a hole. The engine goes on."""
    prompts = [[ACTIVE[n % 16]] * length for n, length in enumerate((20, 15))]
    expected = tiny_llms("llama-v2").generate(prompts, GREEDY)
    real, seen = cycle_runner._to_host, []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == number + 1:
            raise torch.OutOfMemoryError("no pinned memory is left")
        return real(tensor)

    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        monkeypatch.setattr(cycle_runner, "_to_host", to_host)
        outputs = llm.generate(prompts, GREEDY)
        assert any(output.finish_reason == "error" for output in outputs)
        for output, whole in zip(outputs, expected, strict=True):
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            if output.finish_reason == "error":
                assert "its output was lost" in (output.error or "")
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == [one.token_ids for one in expected]
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


@pytest.mark.fault("out of memory in a recording")
def test_an_engine_without_memory_for_its_graphs_does_not_start(
    tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        def __init__(self, device: torch.device) -> None:
            self.recorded = 0

        def capture(self, function: Callable[[], object]) -> object:
            self.recorded += 1
            if self.recorded > 3:
                raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")
            return function()

    monkeypatch.setattr(cycle_runner, "GraphPool", Pool)
    with pytest.raises(EngineError, match="no memory left to record a cycle of 8 requests") as caught:
        LLM(tiny_engines("llama-v2"), device="cpu", options=EngineOptions(graphs=True))
    assert "--max-batch-size" in (caught.value.hint or "")


@pytest.mark.fault("out of pages")
def test_deadline_passes_while_waiting_for_pages_and_while_running(tiny_engines: Callable) -> None:
    streams = Streams()
    with LLM(tiny_engines("llama-v2", max_batch_size=1), device="cpu") as llm:
        # Patience the engine does not have, for one that runs and one that waits behind it.
        long = replace(GREEDY, max_tokens=240)
        llm.submit("hello d", long, streams.add, request_id="running", deadline_s=0.05)
        llm.submit("hello d", GREEDY, streams.add, request_id="waiting", deadline_s=0.001)
        llm.submit("hello d", GREEDY, streams.add, request_id="patient")
        streams.wait(3)
        for name in ("running", "waiting"):
            last = streams.last[name]
            assert (last.finish_reason, last.error_kind) == ("error", "deadline")
            assert f"while the request was {name}" in (last.error or "")
        assert streams.last["patient"].finish_reason == "length"
        stats = llm.stats()
        assert stats.counters["requests_expired"] == 2
        assert stats.pages_used == 0


def test_deadline_wakes_an_engine_with_nothing_to_do(tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose grammar is still compiling cannot be admitted; its deadline comes all the same."""
    pytest.importorskip("xgrammar")
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        hold = threading.Event()
        monkeypatch.setattr(llm._grammars, "_compile", lambda *_: hold.wait(30))
        streams = Streams()
        params = replace(GREEDY, ignore_eos=False, structured_output={"regex": "a"})  # type: ignore[arg-type]
        began = time.monotonic()
        llm.submit("hello d", params, streams.add, deadline_s=0.2)
        streams.wait(1, timeout_s=10)
        assert 0.2 <= time.monotonic() - began < 5
        hold.set()
        assert next(iter(streams.last.values())).error_kind == "deadline"


def test_full_queue_refuses_and_serves_again(tiny_engines: Callable) -> None:
    streams = Streams()
    with LLM(tiny_engines("llama-v2", max_batch_size=2), device="cpu", max_queue=3) as llm:
        accepted, refused = 0, []
        for _ in range(40):
            try:
                llm.submit("hello d", GREEDY, streams.add)
                accepted += 1
            except QueueFullError as error:
                refused.append(error.retry_after_s)
        assert accepted >= 5
        assert refused
        assert min(refused) >= 1.0
        streams.wait(accepted)
        assert llm.stats().counters["requests_refused"] == len(refused)
        llm.submit("hello d", GREEDY, streams.add)
        streams.wait(accepted + 1)


class _Passes:
    """Counts the engine's passes, so that waiting is measured in work and not in seconds."""

    def __init__(self, llm: LLM) -> None:
        self.count = 0
        self.at: dict[str, list[int]] = {}
        real = llm._engine._step

        def step() -> None:
            self.count += 1
            real()

        llm._engine._step = step  # type: ignore[method-assign]

    def note(self, request_id: str) -> None:
        self.at.setdefault(request_id, []).append(self.count)


def test_mixed_load_bounds_first_tokens_and_gaps(tiny_engines: Callable) -> None:
    """Long prompts, short prompts and long outputs together, on pages for two whole sequences; in passes.

    Some two requests always fit, so list scheduling bounds when each starts (Graham 1969: earlier work over two), and
    prefill, one budget a pass, is a queue of its own. Who runs gets tokens in every pass, unless it was preempted.
    """
    draw = torch.Generator().manual_seed(3)
    slots, count, budget = 6, 48, 32
    engines = tiny_engines("llama-v2", max_batch_size=slots, max_num_tokens=budget)
    with LLM(engines, device="cpu", kv_cache_tokens=2 * 256) as llm:
        passes, streams = _Passes(llm), Streams()

        def on_chunk(chunk: OutputChunk) -> None:
            if chunk.token_ids:
                passes.note(chunk.request_id)
            streams.add(chunk)

        chunks, outputs = [], []
        for number in range(count):
            prompt = 100 if number % 4 == 0 else 12
            outputs.append(150 if number % 3 == 0 else 10)
            chunks.append(-(-prompt // budget))
            tokens = [ACTIVE[int(t)] for t in torch.randint(16, (prompt,), generator=draw)]
            params = replace(GREEDY, max_tokens=outputs[-1], temperature=1.0, seed=number)
            llm.submit(tokens, params, on_chunk, request_id=f"{number}")
        streams.wait(count, timeout_s=120)
        counters = llm.stats().counters
    assert counters["requests_finished"] == count
    assert counters["preemptions"] > 0
    metrics = [streams.last[f"{number}"].metrics for number in range(count)]
    # At most a whole sequence is computed again after each preemption.
    again = counters["preemptions"] * (256 // budget)
    for number, facts in enumerate(metrics):
        assert facts is not None
        at = passes.at[f"{number}"]
        assert at[0] <= sum(outputs[:number]) / 2 + sum(chunks[: number + slots]) + again
        longest_gap = max((right - left for left, right in pairwise(at)), default=1)
        if facts.preemptions == 0:
            assert longest_gap == 1
        # A preempted request waits for those before it, of which at most the other slots' were running.
        assert longest_gap <= 1 + facts.preemptions * (slots * 150 + again)
    assert sum(facts.preemptions == 0 for facts in metrics if facts) > count / 2

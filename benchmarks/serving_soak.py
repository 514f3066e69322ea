"""The soak: thousands of mixed requests, some cancelled, some invalid; every one is accounted for at the end."""

from __future__ import annotations

import importlib.util
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.outputs import OutputChunk
from trtllm_dflash.serving.client import TritonHttpError, token_ids
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

TESTS = Path(__file__).parents[1] / "tests"
CLIENTS = 48
CANCELLED_SHARE, INVALID_SHARE = 0.20, 0.05
MAX_SEQ_LEN = 256
# Pages for fewer sequences than slots, so that requests are preempted all the time.
KV_CACHE_TOKENS = 32 * 16
_BEGINNINGS = 6
# One request in so many keeps its output for comparison.
_KEPT_EVERY = 20
_INVALID: tuple[dict[str, Any], ...] = (
    {"input_ids": [1] * (MAX_SEQ_LEN + 1)},
    {"input_ids": []},
    {"input_ids": [10**6]},
    {"max_tokens": 0},
    {"temperature": -1.0},
    {"top_p": 1.5},
    {"top_k": -1},
    {"repetition_penalty": 0.0},
)


@dataclass(frozen=True)
class SoakRequest:
    """One request of the load. ``inputs`` carry Triton's names. ``cancel_after``: chunks, or None."""

    number: int
    inputs: dict[str, Any]
    is_invalid: bool
    cancel_after: int | None


@dataclass(frozen=True)
class SoakResult:
    """How it ended: finished, cancelled, refused or failed."""

    outcome: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    detail: str = ""


class Door(Protocol):
    """A way into the engine."""

    def run(self, request: SoakRequest) -> SoakResult: ...

    def resident_bytes(self) -> int: ...

    def stats(self) -> dict[str, int]: ...


class InProcess:
    """Through ``LLM.submit``."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, request: SoakRequest) -> SoakResult:
        chunks: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        try:
            prompt, params = _parsed(request.inputs)
            request_id = self._llm.submit(prompt, params, chunks.put, priority=request.number % 3 - 1)
        except RequestError as error:
            return SoakResult("refused", detail=str(error))
        if request.cancel_after == 0:
            self._llm.cancel(request_id)
        tokens: list[int] = []
        text, seen = "", 0
        while True:
            chunk = chunks.get(timeout=300)
            tokens.extend(chunk.token_ids)
            text += chunk.text
            seen += 1
            if seen == request.cancel_after:
                self._llm.cancel(request_id)
            if chunk.finish_reason is not None:
                outcome = {"cancelled": "cancelled", "error": "failed"}.get(chunk.finish_reason, "finished")
                return SoakResult(outcome, tuple(tokens), text, chunk.error or "")

    def resident_bytes(self) -> int:
        return _resident_bytes(os.getpid())

    def stats(self) -> dict[str, int]:
        stats = self._llm.stats()
        pages = {name: getattr(stats, name) for name in ("pages_total", "pages_free", "pages_used", "pages_cached")}
        return {**pages, "running": stats.running, "waiting": stats.waiting, **stats.counters}


class Served:
    """Through a real tritonserver's ``generate_stream``; cancelling is closing the connection."""

    def __init__(self, server: ServerHandle) -> None:
        self._server = server
        self._pid = int(str(server.client(60).health()["engine_pid"]))

    def run(self, request: SoakRequest) -> SoakResult:
        tokens: list[int] = []
        text, seen = "", 0
        if request.cancel_after == 0:
            request = replace(request, cancel_after=1)
        try:
            for event in self._server.client(300).generate_stream(**request.inputs):
                tokens.extend(token_ids(event))
                text += str(event["text_output"])
                seen += 1
                if seen == request.cancel_after and "finish_reason" not in event:
                    return SoakResult("cancelled", tuple(tokens), text)
        except TritonHttpError as error:
            is_refusal = "INVALID_ARGUMENT" in error.text or error.status == 400
            return SoakResult("refused" if is_refusal else "failed", detail=error.text)
        return SoakResult("finished", tuple(tokens), text)

    def resident_bytes(self) -> int:
        return _resident_bytes(self._pid)

    def stats(self) -> dict[str, int]:
        facts = self._server.client(60).health()
        found = facts["stats"]
        assert isinstance(found, dict)
        return {name: int(value) for name, value in found.items()}


def soak_figures(*, count: int, served: bool, compared: int = 200) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the soak on a tiny random pair.

    Args:
        count: requests. served: through tritonserver instead of in process. compared: finished requests whose text is
            compared with the text they get alone.

    Returns:
        (figures, details). ``soak_requests``: requests sent; ``soak_unaccounted``: of these, without the one end that
        they should have (failures included); ``soak_leaked_pages``: pages neither free nor cached at the end;
        ``soak_texts_equal``: share of the compared ones; ``soak_rss_slope_mb_per_1000``: of the engine's resident
        memory, a least-squares fit without the first half, with the half-width of its 95 % interval in the details.
    """
    with tempfile.TemporaryDirectory() as folder:
        engines = _tiny_engines(Path(folder))
        load = list(_load(count, seed=11, cancel_at_once=not served))
        with _door(engines, Path(folder), served=served) as door:
            before = _ended(_settled(door))
            began = time.perf_counter()
            results, memory = _drive(door, load)
            elapsed_s = time.perf_counter() - began
            stats = _settled(door)
        unaccounted = sum(not _is_as_expected(load[n], results.get(n)) for n in range(count))
        lost = _counted_differently(results, stats, before, served=served)
        equal, sample = _texts_equal(engines, load, results, compared)
    slope, half_width = _slope_per_request(memory)
    outcomes = Counter(result.outcome for result in results.values())
    figures = {
        "soak_requests": len(results),
        "soak_unaccounted": unaccounted + lost,
        "soak_leaked_pages": stats["pages_total"] - stats["pages_free"] - stats.get("pages_cached", 0),
        "soak_texts_equal": equal,
        "soak_rss_slope_mb_per_1000": round(slope * 1000 / 2**20, 4),
        "soak_s": round(elapsed_s, 1),
    }
    details = {
        "door": "tritonserver" if served else "in process",
        "outcomes": dict(outcomes),
        "cancellations_sent": sum(request.cancel_after is not None for request in load),
        "texts_compared": sample,
        "rss_slope_half_width_mb_per_1000": round(half_width * 1000 / 2**20, 4),
        "rss_mb": [round(size / 2**20, 1) for _, size in memory[:: max(1, len(memory) // 20)]],
        "counters": {name: value for name, value in stats.items() if not name.startswith("pages_")},
        "failures": sorted({r.detail for r in results.values() if r.outcome == "failed"})[:5],
    }
    return figures, details


def _tiny_engines(folder: Path) -> Path:
    """The tests' tiny random pair (windowed DFlash 2 drafter), converted and built."""
    sys.path.insert(0, str(TESTS))
    from tiny_pair import PAIRS, random_target, write_drafter, write_target

    target_recipe, drafter_recipe = PAIRS["llama-v2"]
    write_target(folder / "target", target_recipe)
    write_drafter(folder / "drafter", drafter_recipe, random_target(target_recipe))
    convert(str(folder / "target"), str(folder / "drafter"), folder / "checkpoint")
    limits = {"max_batch_size": 16, "max_seq_len": MAX_SEQ_LEN, "max_num_tokens": 256}
    build(folder / "checkpoint", folder / "engines", backend="torch", **limits)
    return folder / "engines"


@contextmanager
def _door(engines: Path, folder: Path, *, served: bool) -> Iterator[Door]:
    if not served:
        # As on a GPU: a cycle is launched before the one before it was read.
        options = EngineOptions(overlap=True)
        with LLM(engines, device="cpu", kv_cache_tokens=KV_CACHE_TOKENS, options=options) as llm:
            yield InProcess(llm)
        return
    deploy(engines, folder / "repository", device="cpu")
    with triton_server(folder / "repository", log=folder / "triton.log", start_timeout_s=120) as server:
        yield Served(server)


def _load(count: int, *, seed: int, cancel_at_once: bool) -> Iterator[SoakRequest]:
    from tiny_pair import ACTIVE

    draw = random.Random(seed)
    beginnings = [[draw.choice(ACTIVE) for _ in range(96)] for _ in range(_BEGINNINGS)]
    has_grammars = importlib.util.find_spec("xgrammar") is not None
    for number in range(count):
        shared = draw.choice(beginnings)[: draw.choice((0, 0, 40, 96))]
        prompt = shared + [draw.choice(ACTIVE) for _ in range(int(2 ** draw.uniform(0, 6)))]
        inputs: dict[str, Any] = {
            "input_ids": prompt,
            "max_tokens": int(2 ** draw.uniform(0, 6.5)),
            "temperature": draw.choice((0.0, 0.7, 1.0)),
            "seed": number,
            "ignore_eos": draw.random() < 0.5,
        }
        if draw.random() < 0.2:
            inputs |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.9, "top_k": 12}
        if has_grammars and cancel_at_once and draw.random() < 0.03:
            inputs |= {"structured_output": {"regex": "[a-e]{3}(the|an){1,4}"}, "ignore_eos": False}
        if draw.random() < 0.1:
            # Short prompts with long outputs outgrow what was free when they were admitted.
            inputs |= {"input_ids": prompt[:16], "max_tokens": draw.randrange(100, 200), "ignore_eos": True}
            inputs.pop("structured_output", None)
        is_invalid = draw.random() < INVALID_SHARE
        if is_invalid:
            inputs |= draw.choice(_INVALID)
        cancel_after = None
        if not is_invalid and draw.random() < CANCELLED_SHARE / (1 - INVALID_SHARE):
            cancel_after = draw.randrange(0 if cancel_at_once else 1, 8)
            # Long enough to be running still when it is cancelled.
            inputs |= {"max_tokens": 90, "ignore_eos": True}
            inputs.pop("structured_output", None)
        yield SoakRequest(number, inputs, is_invalid, cancel_after)


def _parsed(inputs: dict[str, Any]) -> tuple[list[int], SamplingParams]:
    fields = dict(inputs)
    return fields.pop("input_ids"), SamplingParams(**fields)


def _drive(door: Door, load: list[SoakRequest]) -> tuple[dict[int, SoakResult], list[tuple[int, int]]]:
    """Closed loop of ``CLIENTS`` clients; memory is sampled by the number of requests done."""
    todo = iter(load)
    results: dict[int, SoakResult] = {}
    memory: list[tuple[int, int]] = []
    lock = threading.Lock()
    every = max(1, len(load) // 200)

    def client() -> None:
        while True:
            with lock:
                request = next(todo, None)
            if request is None:
                return
            try:
                result = door.run(request)
            except Exception as error:
                result = SoakResult("failed", detail=f"{type(error).__name__}: {error}")
            if request.number % _KEPT_EVERY:
                # The measuring must not be what grows.
                result = replace(result, tokens=(), text="", detail=result.detail if result.outcome == "failed" else "")
            with lock:
                results[request.number] = result
                if len(results) % every == 0:
                    memory.append((len(results), door.resident_bytes()))
                if len(results) % (len(load) // 10 or 1) == 0:
                    print(f"  {len(results)} of {len(load)}", flush=True)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, memory


def _settled(door: Door) -> dict[str, int]:
    """Statistics once nothing runs: a served cancellation reaches the engine after its client has gone."""
    give_up_at = time.monotonic() + 30
    while True:
        stats = door.stats()
        # A server that has just started has had no heartbeat yet, hence no statistics.
        if stats and (stats["running"] + stats["waiting"] == 0 or time.monotonic() > give_up_at):
            return stats
        time.sleep(0.6)


def _is_as_expected(request: SoakRequest, result: SoakResult | None) -> bool:
    if result is None:
        return False
    if request.is_invalid:
        return result.outcome == "refused"
    if request.cancel_after is None:
        return result.outcome == "finished"
    # Who is cancelled may have finished before.
    return result.outcome in ("cancelled", "finished")


def _ended(stats: dict[str, int]) -> int:
    return sum(stats.get(name, 0) for name in ("requests_finished", "requests_cancelled", "requests_failed"))


def _counted_differently(
    results: dict[int, SoakResult], stats: dict[str, int], ended_before: int, *, served: bool
) -> int:
    """Requests that the engine counts otherwise than the clients; it counts no refused ones."""
    accepted = sum(result.outcome != "refused" for result in results.values())
    ended = _ended(stats) - ended_before
    if served:
        # The supervisor's canary requests come on top.
        return max(0, accepted - ended) + stats["requests_failed"]
    finished = sum(result.outcome == "finished" for result in results.values())
    return abs(accepted - ended) + stats["requests_failed"] + abs(finished - stats["requests_finished"])


def _texts_equal(
    engines: Path, load: list[SoakRequest], results: dict[int, SoakResult], compared: int
) -> tuple[float, int]:
    """Share of finished requests whose tokens and text are those of a run alone, without prefix cache."""
    finished = [n for n, result in sorted(results.items()) if result.outcome == "finished" and n % _KEPT_EVERY == 0]
    sample = random.Random(5).sample(finished, min(compared, len(finished)))
    equal = 0
    with LLM(engines, device="cpu", prefix_cache=False) as llm:
        for number in sample:
            prompt, params = _parsed(load[number].inputs)
            (alone,) = llm.generate([prompt], params)
            equal += (alone.token_ids, alone.text) == (results[number].tokens, results[number].text)
    return equal / len(sample), len(sample)


def _slope_per_request(memory: list[tuple[int, int]]) -> tuple[float, float]:
    """Least-squares slope of resident bytes over requests, and the half-width of its 95 % interval."""
    points = np.array(memory[len(memory) // 2 :], dtype=np.float64)
    x, y = points[:, 0] - points[:, 0].mean(), points[:, 1] - points[:, 1].mean()
    slope = float((x * y).sum() / (x * x).sum())
    residuals = y - slope * x
    error = float(np.sqrt((residuals**2).sum() / max(len(x) - 2, 1) / (x * x).sum()))
    return slope, 1.96 * error


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

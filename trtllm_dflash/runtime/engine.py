"""The engine loop: continuous batching of requests over one session, on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.runtime.block_policy import BlockSizePolicy, CycleTable
from trtllm_dflash.runtime.cycle import FAULTY, OUT_OF_LENGTH, STOPPED
from trtllm_dflash.runtime.cycle_profile import CycleProfiler
from trtllm_dflash.runtime.cycle_runner import (
    CycleRunner,
    EngineOptions,
    HostResult,
    PendingResult,
    batch_choices,
    block_size_choices,
)
from trtllm_dflash.runtime.outputs import EngineStats, FinishReason, OutputChunk, RequestMetrics, TokenLogprobs
from trtllm_dflash.runtime.pages import PagePool
from trtllm_dflash.runtime.prefill import plan_chunks, run_prefill
from trtllm_dflash.runtime.refill import RefillPolicy
from trtllm_dflash.runtime.request import Request, RequestSpec
from trtllm_dflash.runtime.slots import SamplingMode, SlotState
from trtllm_dflash.runtime.text import TextStream

logger = logging.getLogger(__name__)

_Member = TypeVar("_Member")

_COUNTERS = (
    "requests_finished",
    "requests_cancelled",
    "requests_failed",
    "prompt_tokens",
    "output_tokens",
    "cycles",
    "drafted_tokens",
    "accepted_tokens",
)


# Cached tokens per request while the adaptive block size's table is measured.
_PROFILE_CONTEXT = 512
# While requests decode, at least this part of the token budget still goes to prompts.
_PREFILL_SHARE = 4


@dataclass(frozen=True)
class _Launched:
    """A pass whose result nobody has read yet; ``block_size`` is None for a prefill's first tokens."""

    requests: Sequence[Request]
    pending: PendingResult
    block_size: int | None


class Engine:
    """Runs requests: admission, chunked prefill, draft-verify cycles, delivery.

    A request is admitted when a slot is free and the pages for its whole extent (prompt and every token it may emit)
    are: an admitted request never waits for memory.

    Args:
        session: the networks. tokenizer: for streaming text.
        num_pages: pages of the KV caches. block_size: S of the cycle (the largest when it adapts), 1 = no speculation.
        options: how cycles are launched.
    """

    def __init__(
        self,
        session: EngineSession,
        tokenizer: Tokenizer,
        *,
        num_pages: int,
        block_size: int,
        options: EngineOptions | None = None,
    ) -> None:
        limits = session.limits
        self._session = session
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._pool = PagePool(num_pages)
        session.allocate_caches(num_pages)
        self._state = SlotState(
            slots=limits.max_batch_size,
            history_length=limits.max_seq_len + limits.block_size,
            pages_per_request=_pages(limits.max_seq_len, limits.page_tokens),
            scratch_page=num_pages,
            vocab_size=session.target_config.vocab_size,
            device=session.device,
        )
        options = options or EngineOptions()
        on_gpu = session.device.type == "cuda"
        self._overlap = on_gpu if options.overlap is None else options.overlap
        self._runner = CycleRunner(
            session,
            self._state,
            graphs=session.uses_kernels if options.graphs is None else options.graphs,
            forced_acceptance=options.forced_acceptance,
        )
        with torch.inference_mode():
            self._runner.warm_up(block_size)
        self.profiler = CycleProfiler(session, self._state, self._runner, num_pages)
        self._policy: BlockSizePolicy | None = None
        self.cycle_table: CycleTable | None = None
        if options.adaptive and block_size > 1:
            self.cycle_table = self.profiler.table(
                batch_choices(limits.max_batch_size), block_size_choices(block_size), context=_PROFILE_CONTEXT
            )
            self._policy = BlockSizePolicy(self.cycle_table, block_size)
        self._refill = RefillPolicy(limits.max_batch_size)
        self._in_flight: deque[_Launched] = deque()
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._arrived: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dflash-engine", daemon=True)
        self._thread.start()

    def submit(self, spec: RequestSpec, on_chunk: Callable[[OutputChunk], None]) -> None:
        """Queue a request. Raises ``RequestError`` when it could never run."""
        extent = self._extent_pages(spec)
        if extent > self._pool.total:
            page_tokens = self._session.limits.page_tokens
            raise RequestError(
                "max_tokens",
                spec.max_output_tokens,
                f"prompt ({len(spec.prompt)} tokens) and output within the KV cache of "
                f"{self._pool.total * page_tokens} tokens",
                hint="ask for fewer tokens, or give the engine a larger KV cache",
            )
        text = TextStream(self._tokenizer, spec.params.stop, include_stop=spec.params.include_stop_in_output)
        request = Request(spec, text, on_chunk, self._block_size)
        with self._wake:
            if self._closing:
                raise EngineError("the engine is closed")
            if spec.request_id in self._by_id:
                raise RequestError("request_id", spec.request_id, "an id that is not in use")
            self._by_id[spec.request_id] = request
            self._arrived.append(request)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Mark a request; it ends before the next pass. Unknown ids are ignored."""
        with self._wake:
            request = self._by_id.get(request_id)
            if request is not None:
                request.cancelled = True
                self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot; safe from any thread."""
        with self._wake:
            free = self._pool.free
            return EngineStats(
                pages_total=self._pool.total,
                pages_free=free,
                pages_used=self._pool.total - free,
                pages_cached=0,
                running=len(self._running),
                waiting=len(self._waiting) + len(self._arrived),
                counters=dict(self._counters),
            )

    def close(self) -> None:
        """Stop after the pass in progress; requests that are not done end as cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._session.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._arrived or self._waiting or self._running or self._in_flight):
                    self._wake.wait()
                if self._closing:
                    break
                self._waiting.extend(self._arrived)
                self._arrived.clear()
            try:
                self._step()
            except Exception as error:
                # Not a single pass but the loop itself: whatever happened, no request may wait for ever.
                logger.exception("the engine loop failed")
                self._fail_all(error)
        for request in [*self._running, *self._waiting, *self._arrived]:
            self._finish(request, "cancelled")

    @torch.inference_mode()
    def _step(self) -> None:
        """One turn of the loop: cancel, admit, launch prefill and a cycle, then read what was launched a turn ago."""
        for request in [*self._waiting, *self._running]:
            if request.cancelled:
                self._finish(request, "cancelled")
        if self._refill.is_open(len(self._waiting), len(self._running), len(self._free_slots), time.perf_counter()):
            self._admit()
        decoding = [r for r in self._running if r.is_prefilled and r.may_emit]
        launched = self._prefill([r for r in self._running if not r.is_prefilled], len(decoding))
        launched += self._decode([r for r in self._running if r.is_prefilled and r.may_emit])
        self._in_flight.extend(launched)
        # With overlap the newest cycle is read a turn later, while the device runs the one after it.
        kept = 1 if self._overlap and launched else 0
        while len(self._in_flight) > kept:
            self._deliver(self._in_flight.popleft())

    def _fail_all(self, error: Exception) -> None:
        for request in [*self._running, *self._waiting]:
            try:
                self._finish(request, "error", f"the engine failed: {type(error).__name__}")
            except Exception:
                logger.exception("request %s could not be ended cleanly", request.spec.request_id)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            extent = self._extent_pages(request.spec)
            with self._wake:
                if extent > self._pool.free:
                    return
                pages = self._pool.acquire(request.spec.request_id, extent)
                self._waiting.popleft()
                request.slot = self._free_slots.pop()
                request.context_host = len(request.spec.prompt) - 1
                request.first_scheduled = time.perf_counter()
                self._running.append(request)
            spec = request.spec
            try:
                self._state.start(
                    request.slot,
                    spec.prompt,
                    spec.params,
                    seed=spec.seed,
                    max_output_tokens=spec.max_output_tokens,
                    stop_ids=spec.stop_ids,
                    bad_words=spec.bad_words,
                    pages=pages,
                )
            except Exception as error:
                logger.exception("request %s could not be started", spec.request_id)
                self._finish(request, "error", f"the request could not be started: {type(error).__name__}")

    def _prefill(self, requests: Sequence[Request], decoding: int) -> list[_Launched]:
        """Launch one budget of prompt tokens; what the cycle of ``decoding`` requests computes is taken from it."""
        if not requests:
            return []
        whole = self._session.limits.max_num_tokens
        budget = max(whole - decoding * self._block_size, whole // _PREFILL_SHARE, 1)
        groups = [plan_chunks(requests, budget)]
        launched = []
        while groups:
            group = groups.pop(0)
            try:
                completed, result = run_prefill(self._session, self._state, group)
                if result is not None:
                    launched.append(_Launched(completed, PendingResult(result), block_size=None))
            except Exception as error:
                groups[:0] = self._isolate(error, group, [chunk.request for chunk in group])
                continue
            for request in completed:
                request.in_flight += 1
        return launched

    def _decode(self, requests: Sequence[Request]) -> list[_Launched]:
        groups = [list(requests)] if requests else []
        launched = []
        while groups:
            group = groups.pop(0)
            try:
                block_size = self._choose_block_size(group)
                columns = self._columns(group, block_size)
                mode = SamplingMode()
                for request in group:
                    mode |= request.spec.mode
                slots = [r.slot for r in group if r.slot is not None]
                pending = self._runner.launch(slots, block_size, columns, mode)
            except Exception as error:
                groups[:0] = self._isolate(error, group, group)
                continue
            for request in group:
                request.in_flight += 1
            launched.append(_Launched(group, pending, block_size))
        return launched

    def _choose_block_size(self, group: Sequence[Request]) -> int:
        useful = max(r.remaining_host for r in group) + 1
        if self._policy is None or any(r.is_reproducible for r in group):
            return min(self._block_size, useful)
        return self._policy.choose(len(group), useful)

    def _columns(self, group: Sequence[Request], block_size: int) -> int:
        """Pages that any of the group's blocks may touch: each cycle not yet read may have moved a context by S."""
        furthest = max(r.context_host + r.in_flight * self._block_size for r in group) + block_size
        return min(_pages(furthest, self._session.limits.page_tokens), self._state.page_table.shape[1])

    def _isolate(
        self, error: Exception, members: Sequence[_Member], requests: Sequence[Request]
    ) -> list[list[_Member]]:
        """A pass that failed published nothing: run its requests one by one, so that only the guilty one fails."""
        logger.exception("a pass over %d request(s) failed", len(requests))
        if len(requests) > 1:
            return [[member] for member in members]
        self._finish(requests[0], "error", f"the engine failed while running this request: {type(error).__name__}")
        return []

    def _deliver(self, launched: _Launched) -> None:
        """Read one pass and hand out its tokens; requests that have ended meanwhile get nothing of it."""
        result = launched.pending.read(len(launched.requests))
        for request in launched.requests:
            request.in_flight -= 1
        if self._policy is not None and launched.block_size is not None:
            live = [row for row, request in enumerate(launched.requests) if not request.finished]
            self._policy.observe(launched.block_size, [result.accepted[row] for row in live])
        for row, request in enumerate(launched.requests):
            if request.finished:
                continue
            if result.status[row] == FAULTY:
                self._finish(request, "error", "the target's logits are not numbers")
                continue
            tokens = result.tokens[row][: result.produced[row]]
            drafted = None
            if launched.block_size is not None:
                drafted = min(launched.block_size, request.remaining_host + 1) - 1
            try:
                request.deliver(
                    tokens,
                    _token_logprobs(result, row, tokens, request.spec.params.logprobs),
                    stopped=result.status[row] == STOPPED,
                    at_limit=result.status[row] == OUT_OF_LENGTH,
                    drafted=drafted,
                )
            except Exception as error:
                logger.exception("the output of request %s could not be delivered", request.spec.request_id)
                self._finish(request, "error", f"the output could not be turned into text: {type(error).__name__}")
                continue
            if request.finished:
                self._retire(request)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        try:
            request.end(reason, error)
        finally:
            self._retire(request, reason)

    def _retire(self, request: Request, reason: FinishReason = "stop") -> None:
        """Give slot and pages back, once, and count the request."""
        metrics = request.metrics()
        with self._wake:
            self._by_id.pop(request.spec.request_id, None)
            if request.slot is not None:
                pages = self._pool.release(request.spec.request_id)
                self._running.remove(request)
                self._free_slots.append(request.slot)
                request.slot = None
                if reason == "error":
                    # What a faulty pass wrote may be NaN, which a mask does not hide from the page's next owner.
                    self._session.clear_pages([*pages, self._pool.total])
            else:
                self._waiting = deque(r for r in self._waiting if r is not request)
            self._count(metrics, reason)

    def _count(self, metrics: RequestMetrics, reason: FinishReason) -> None:
        outcome = {"cancelled": "requests_cancelled", "error": "requests_failed"}.get(reason, "requests_finished")
        self._counters[outcome] += 1
        self._counters["prompt_tokens"] += metrics.prompt_tokens
        self._counters["output_tokens"] += metrics.completion_tokens
        self._counters["cycles"] += metrics.cycles
        self._counters["drafted_tokens"] += metrics.drafted_tokens
        self._counters["accepted_tokens"] += metrics.accepted_tokens

    def _extent_pages(self, spec: RequestSpec) -> int:
        return _pages(len(spec.prompt) + spec.max_output_tokens, self._session.limits.page_tokens)


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def _token_logprobs(result: HostResult, row: int, tokens: Sequence[int], count: int | None) -> list[TokenLogprobs]:
    """Logprobs of one row's emitted tokens with ``count`` alternatives each; none when nobody asked."""
    if count is None or result.logprobs is None or result.top_ids is None or result.top_logprobs is None:
        return []
    return [
        TokenLogprobs(
            token,
            result.logprobs[row][column],
            tuple(
                zip(result.top_ids[row][column][:count], result.top_logprobs[row][column][:count], strict=True),
            ),
        )
        for column, token in enumerate(tokens)
    ]

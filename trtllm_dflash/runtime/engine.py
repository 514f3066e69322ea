"""The engine loop: continuous batching of requests over one session, on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.block_policy import BlockSizePolicy, CycleTable
from trtllm_dflash.runtime.cycle import FAULTY, OUT_OF_LENGTH, STOPPED, Masks
from trtllm_dflash.runtime.cycle_profile import CycleProfiler
from trtllm_dflash.runtime.cycle_runner import (
    CycleRunner,
    EngineOptions,
    PendingResult,
    ResultLostError,
    batch_choices,
    block_size_choices,
)
from trtllm_dflash.runtime.grammar import GrammarRun, allowed_tokens
from trtllm_dflash.runtime.launched_pass import LaunchedPass
from trtllm_dflash.runtime.outputs import (
    EngineStats,
    ErrorKind,
    FinishReason,
    OutputChunk,
    RequestMetrics,
)
from trtllm_dflash.runtime.prefill import PrefillChunk, PrefillRunner, plan_chunks
from trtllm_dflash.runtime.refill import RefillPolicy
from trtllm_dflash.runtime.request import JointMode, Request, RequestSpec, Submission
from trtllm_dflash.runtime.scheduler import AdmissionLimits, Scheduler
from trtllm_dflash.runtime.slots import SlotState
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
    "prefill_tokens",
)

# Cached tokens per request while the adaptive block size's table is measured.
_PROFILE_CONTEXT = 512
# While requests decode, at least this part of the token budget still goes to prompts.
_PREFILL_SHARE = 4


class Engine:
    """Runs requests: admission, chunked prefill, draft-verify cycles, delivery.

    Who runs and on which pages is the scheduler's decision.

    Args:
        session: the networks. tokenizer: for streaming text.
        num_pages: pages of the KV caches. block_size: S of the cycle (the largest when it adapts), 1 = no speculation.
        options: how cycles are launched.
        prefix_cache: keep pages of finished requests for others. limits: bounds of admission.
    """

    def __init__(
        self,
        session: EngineSession,
        tokenizer: Tokenizer,
        *,
        num_pages: int,
        block_size: int,
        options: EngineOptions | None = None,
        prefix_cache: bool = True,
        limits: AdmissionLimits | None = None,
    ) -> None:
        built = session.limits
        self._session = session
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._scratch_page = num_pages
        self._scheduler = Scheduler(
            slots=built.max_batch_size,
            num_pages=num_pages,
            page_tokens=built.page_tokens,
            growth_tokens=2 * block_size,
            # A page that holds a whole sequence is never full, so there is nothing to share.
            prefix_cache=prefix_cache and built.page_tokens < built.max_seq_len,
            limits=limits,
        )
        session.allocate_caches(num_pages)
        self._state = SlotState.of_limits(
            built, vocab_size=session.target_config.vocab_size, scratch_page=num_pages, device=session.device
        )
        options = options or EngineOptions()
        on_gpu = session.device.type == "cuda"
        self._overlap = on_gpu if options.overlap is None else options.overlap
        graphs = session.uses_kernels if options.graphs is None else options.graphs
        self._runner = CycleRunner(session, self._state, graphs=graphs, forced_acceptance=options.forced_acceptance)
        self._prefiller = PrefillRunner(session, self._state, self._runner.pool)
        with torch.inference_mode():
            self._runner.warm_up(block_size)
            self._prefiller.warm_up()
        self._profiler = CycleProfiler(session, self._state, self._runner, num_pages)
        self._policy: BlockSizePolicy | None = None
        self.cycle_table: CycleTable | None = None
        if options.adaptive and block_size > 1:
            self.cycle_table = self._profiler.table(
                batch_choices(built.max_batch_size), block_size_choices(block_size), context=_PROFILE_CONTEXT
            )
            self._policy = BlockSizePolicy(self.cycle_table, block_size)
        self._refill = RefillPolicy(built.max_batch_size)
        self._in_flight: deque[LaunchedPass] = deque()
        self._joint_mode = JointMode()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dflash-engine", daemon=True)
        self._thread.start()

    def submit(
        self, spec: RequestSpec, on_chunk: Callable[[OutputChunk], None], grammar: GrammarRun | None = None
    ) -> None:
        """Queue a request. ``grammar`` may still be compiling: the request waits for it.

        Raises:
            RequestError: it could never run. QueueFullError: too many wait. EngineError: the engine is closed.
        """
        self.submit_all([Submission(spec, on_chunk, grammar)])

    def submit_all(self, submissions: Sequence[Submission]) -> None:
        """Queue several requests, all or none, before the engine looks at any, so that they start together.

        Raises:
            as :meth:`submit`.
        """
        requests = [self._request_of(submission) for submission in submissions]
        with self._wake:
            if self._closing:
                raise EngineError("the engine is closed")
            self._scheduler.enqueue(*requests)
            self._wake.notify()

    def _request_of(self, submission: Submission) -> Request:
        spec = submission.spec
        text = TextStream(self._tokenizer, spec.params.stop, include_stop=spec.params.include_stop_in_output)
        return Request(spec, text, submission.on_chunk, self._block_size, submission.grammar)

    def cancel(self, request_id: str) -> None:
        """Mark a request; it ends before the next pass. Unknown ids are ignored."""
        with self._wake:
            if self._scheduler.cancel(request_id):
                self._wake.notify()

    def wake(self) -> None:
        """Something outside has changed (a grammar is compiled): look at the waiting requests again."""
        with self._wake:
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot; safe from any thread."""
        with self._wake:
            pages = self._scheduler.page_counts()
            return EngineStats(
                pages_total=pages.total,
                pages_free=pages.free,
                pages_used=pages.used,
                pages_cached=pages.cached,
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting),
                counters={**self._counters, **self._scheduler.snapshot()},
            )

    def profiler(self) -> CycleProfiler:
        """Measures cycles on an idle engine. It runs on any page, so no prefix is remembered afterwards."""
        self._scheduler.forget_prefixes()
        return self._profiler

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
                while not (self._closing or self._has_work()):
                    deadline = self._scheduler.next_deadline()
                    self._wake.wait(None if deadline is None else max(0.0, deadline - time.perf_counter()))
                if self._closing:
                    break
            try:
                self._step()
            except Exception as error:
                # Not a single pass but the loop itself: whatever happened, no request may wait for ever.
                logger.exception("the engine loop failed")
                self._fail_all(error)
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(request, "cancelled")

    def _has_work(self) -> bool:
        """Whether a step would do something. With nobody running, whoever is prepared can be admitted."""
        if self._in_flight or self._scheduler.running or self._scheduler.ended(time.perf_counter()):
            return True
        return any(request.is_prepared for request in self._scheduler.waiting)

    @torch.inference_mode()
    def _step(self) -> None:
        """One turn of the loop: cancel, admit, launch prefill and a cycle, then read what was launched a turn ago."""
        now, recorded = time.perf_counter(), self._runner.recorded_graphs
        for ending in self._scheduler.ended(now):
            self._finish(ending.request, ending.reason, ending.error, ending.kind)
        if self._refill.is_open(*self._scheduler.occupancy(), now):
            self._admit()
        running = self._scheduler.running
        unfilled = [r for r in running if not r.is_prefilled]
        decoding = [r for r in running if r.is_prefilled and r.may_emit]
        launched = []
        if unfilled:
            launched = self._prefill(unfilled, len(decoding))
            decoding = [r for r in running if r.is_prefilled and r.may_emit]
        launched += self._launch(self._with_pages(decoding), lambda request: request, self._launch_cycle)
        self._in_flight.extend(launched)
        # With overlap the newest cycle is read a turn later, while the device runs the one after it. A grammar's masks
        # need the result of the cycle before, so with one among the requests nothing is gained by waiting.
        kept = 1 if self._overlap and launched and not any(r.grammar for r in running) else 0
        waited = 0.0
        while len(self._in_flight) > kept:
            oldest = self._in_flight.popleft()
            self._deliver(oldest)
            waited += oldest.pending.waited_s
        only_a_cycle = len(launched) == 1 and launched[0].block_size is not None
        if self._policy is not None and kept and only_a_cycle and self._runner.recorded_graphs == recorded:
            self._policy.observe_host(len(launched[0].requests), time.perf_counter() - now - waited)

    def _fail_all(self, error: Exception) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            try:
                self._finish(request, "error", f"the engine failed: {type(error).__name__}")
            except Exception:
                logger.exception("request %s could not be ended cleanly", request.spec.request_id)

    def _admit(self) -> None:
        for request in self._scheduler.admit(time.perf_counter()):
            spec = request.spec
            assert request.slot is not None
            request.context_host = len(spec.prompt) + request.emitted - 1
            try:
                self._state.start(
                    request.slot,
                    spec.prompt,
                    spec.params,
                    seed=spec.seed,
                    max_output_tokens=spec.max_output_tokens,
                    stop_ids=spec.stop_ids,
                    bad_words=spec.bad_words,
                    pages=request.pages,
                    output=request.output,
                )
            except Exception as error:
                logger.exception("request %s could not be started", spec.request_id)
                self._finish(request, "error", f"the request could not be started: {type(error).__name__}")

    def _with_pages(self, requests: Sequence[Request]) -> list[Request]:
        """Give every request the pages of its next cycle, in the order of service; leave out who was preempted."""
        added: list[tuple[Request, int]] = []
        page_tokens, size = self._session.limits.page_tokens, self._block_size
        # Who has room is not asked one by one. Every cycle that was not read yet may have moved the context by S.
        growing = [r for r in requests if r.context_host + (r.in_flight + 1) * size > len(r.pages) * page_tokens]
        for request in sorted(growing, key=lambda one: one.rank):
            held = len(request.pages)
            furthest = request.context_host + (request.in_flight + 1) * size
            if request.slot is None or not self._scheduler.reserve(request, furthest):
                continue
            if len(request.pages) > held:
                added.append((request, held))
        if added:
            self._state.add_pages([(r.slot, held, r.pages[held:]) for r, held in added if r.slot is not None])
        return [request for request in requests if request.slot is not None]

    def _masks(self, requests: Sequence[Request]) -> Masks | None:
        runs = [request.grammar for request in requests]
        if not any(runs):
            return None
        return lambda drafts: allowed_tokens(runs, drafts, self._session.target_config.vocab_size)

    def _prefill(self, requests: Sequence[Request], decoding: int) -> list[LaunchedPass]:
        """Launch one budget of prompt tokens; what the cycle of ``decoding`` requests computes is taken from it."""
        if not requests:
            return []
        whole = self._session.limits.max_num_tokens
        budget = max(whole - decoding * self._block_size, whole // _PREFILL_SHARE, 1)
        most = self._prefiller.most_tokens or budget
        launched: list[LaunchedPass] = []
        while budget > 0 and requests:
            group = plan_chunks(requests, min(budget, most), self._prefiller.most_requests)
            budget -= sum(chunk.count for chunk in group)
            launched += self._launch(group, lambda chunk: chunk.request, self._launch_chunks)
            requests = [request for request in requests if request.slot is not None and not request.is_prefilled]
        return launched

    def _launch_chunks(self, chunks: list[PrefillChunk]) -> LaunchedPass | None:
        """One prefill pass; None when it completes no prompt."""
        completed, result = self._prefiller.run(chunks, self._masks)
        launched = None if result is None else LaunchedPass.of(completed, PendingResult(result), block_size=None)
        self._counters["prefill_tokens"] += sum(chunk.count for chunk in chunks)
        return launched

    def _launch_cycle(self, requests: list[Request]) -> LaunchedPass:
        block_size = self._choose_block_size(requests)
        columns = self._columns(requests, block_size)
        mode = self._joint_mode.of(requests)
        slots = [request.slot for request in requests if request.slot is not None]
        pending = self._runner.launch(slots, block_size, columns, mode, self._masks(requests))
        return LaunchedPass.of(requests, pending, block_size)

    def _launch(
        self,
        members: Sequence[_Member],
        request_of: Callable[[_Member], Request],
        launch: Callable[[list[_Member]], LaunchedPass | None],
    ) -> list[LaunchedPass]:
        """One pass over ``members``. One that fails has published nothing: then each has a pass of its own, so that
        only the guilty one fails."""
        groups = [list(members)] if members else []
        launched = []
        while groups:
            group = groups.pop(0)
            requests = [request_of(member) for member in group]
            try:
                one = launch(group)
            except ResultLostError:
                # Slots have moved forward by tokens that nobody will see: these requests cannot go on.
                logger.exception("the result of a pass over %d request(s) is lost", len(group))
                for request in requests:
                    self._finish(request, "error", "the engine failed while running this request: its output was lost")
            except Exception as error:
                logger.exception("a pass over %d request(s) failed", len(group))
                if len(group) > 1:
                    groups[:0] = [[member] for member in group]
                else:
                    text = f"the engine failed while running this request: {type(error).__name__}"
                    self._finish(requests[0], "error", text)
            else:
                if one is not None:
                    for request in one.requests:
                        request.in_flight += 1
                    launched.append(one)
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

    def _deliver(self, launched: LaunchedPass) -> None:
        """Read one pass and hand out its tokens; requests that have ended meanwhile get nothing of it."""
        result = launched.pending.read(len(launched.requests))
        awaited = launched.awaited()
        for _, request in awaited:
            request.in_flight -= 1
        if self._policy is not None and launched.block_size is not None:
            self._policy.observe(launched.block_size, [result.accepted[row] for row, _ in awaited])
        for row, request in awaited:
            status = result.status[row]
            if status == FAULTY:
                self._finish(request, "error", "the target's logits are not numbers")
                continue
            tokens = result.tokens[row][: result.produced[row]]
            drafted = None
            if launched.block_size is not None:
                drafted = min(launched.block_size - 1, request.remaining_host)
            try:
                request.deliver(
                    tokens,
                    result.token_logprobs(row, tokens, request.spec.params.logprobs),
                    stopped=status == STOPPED,
                    at_limit=status == OUT_OF_LENGTH,
                    drafted=drafted,
                )
            except Exception as error:
                logger.exception("the output of request %s could not be delivered", request.spec.request_id)
                self._finish(request, "error", f"the output could not be turned into text: {type(error).__name__}")
                continue
            if request.finish_reason is not None:
                self._retire(request, request.finish_reason)

    def _finish(
        self, request: Request, reason: FinishReason, error: str | None = None, kind: ErrorKind = "engine"
    ) -> None:
        try:
            request.end(reason, error, kind)
        finally:
            self._retire(request, reason)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """Give slot and pages back, once, and count the request."""
        metrics = request.metrics()
        with self._wake:
            had_pages = request.slot is not None
            pages = self._scheduler.retire(request, 0 if reason == "error" else request.committed_host)
            if reason == "error" and had_pages:
                # What a faulty pass wrote may be NaN, which a mask does not hide from the page's next owner.
                self._session.clear_pages([*pages, self._scratch_page])
            self._count(metrics, reason)

    def _count(self, metrics: RequestMetrics, reason: FinishReason) -> None:
        outcome = {"cancelled": "requests_cancelled", "error": "requests_failed"}.get(reason, "requests_finished")
        self._counters[outcome] += 1
        self._counters["prompt_tokens"] += metrics.prompt_tokens
        self._counters["output_tokens"] += metrics.completion_tokens
        self._counters["cycles"] += metrics.cycles
        self._counters["drafted_tokens"] += metrics.drafted_tokens
        self._counters["accepted_tokens"] += metrics.accepted_tokens


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)

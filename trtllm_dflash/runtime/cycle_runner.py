"""Launching cycles and reading their results: the host side of the two clocks.

A cycle is launched on slots; its result travels to the host on the same stream and is read when somebody asks for it.
On a GPU with the plugin kernels the whole cycle is one CUDA graph per (batch bucket, block size, sampling mode);
elsewhere the same function runs eagerly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trtllm_dflash.engine.cuda_graphs import CapturedGraph, GraphPool
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.cycle import CycleResult, Masks, draft_verify_cycle
from trtllm_dflash.runtime.launch_trace import LaunchTrace
from trtllm_dflash.runtime.outputs import TokenLogprobs
from trtllm_dflash.runtime.prefill_pass import PassSizes
from trtllm_dflash.runtime.slots import SamplingMode, SlotState, upload

GraphKey = tuple[int, int, SamplingMode]

# Batches are padded to one of these: few graphs, little padding where padding is dear.
_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class HostResult:
    """A result as the host reads it: Python lists, one entry per request."""

    tokens: list[list[int]]
    produced: list[int]
    accepted: list[int]
    status: list[int]
    logprobs: list[list[float]] | None
    top_logprobs: list[list[list[float]]] | None
    top_ids: list[list[list[int]]] | None

    def token_logprobs(self, row: int, tokens: Sequence[int], count: int | None) -> list[TokenLogprobs]:
        """Logprobs of one row's emitted tokens with ``count`` alternatives each; none when nobody asked."""
        if count is None or self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return []
        return [
            TokenLogprobs(
                token,
                self.logprobs[row][column],
                tuple(zip(self.top_ids[row][column][:count], self.top_logprobs[row][column][:count], strict=True)),
            )
            for column, token in enumerate(tokens)
        ]


class ResultLostError(EngineError):
    """A pass has moved its slots forward, but its result cannot come to the host: it must not be run again."""


class PendingResult:
    """A result on its way to the host. ``read`` waits for it.

    Args:
        result: of a pass whose work is queued; its tensors may be overwritten by the next pass on this stream.

    Raises:
        ResultLostError: there is no memory for it.

    Attributes:
        waited_s: seconds that ``read`` waited for the device.
    """

    def __init__(self, result: CycleResult) -> None:
        self.waited_s = 0.0
        self._event: torch.cuda.Event | None = None
        self._parts: list[Tensor] = []
        try:
            self._send(result)
        except Exception as error:
            raise ResultLostError(f"the result of a pass is lost: {error}") from error

    def _send(self, result: CycleResult) -> None:
        packed = result.packed
        if packed is None:
            columns = (result.produced[:, None], result.accepted[:, None], result.status[:, None])
            packed = torch.cat((result.tokens, *columns), dim=1)
        self._parts.append(_to_host(packed))
        for part in (result.logprobs, result.top_logprobs, result.top_ids):
            if part is not None:
                self._parts.append(_to_host(part))
        if packed.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self, rows: int) -> HostResult:
        """The first ``rows`` rows, when the device has got that far."""
        if self._event is not None:
            began = time.perf_counter()
            self._event.synchronize()
            self.waited_s = time.perf_counter() - began
        packed = self._parts[0][:rows].tolist()
        logprobs, top, ids = [part[:rows].tolist() for part in self._parts[1:]] or (None, None, None)
        return HostResult(
            tokens=[row[:-3] for row in packed],
            produced=[row[-3] for row in packed],
            accepted=[row[-2] for row in packed],
            status=[row[-1] for row in packed],
            logprobs=logprobs,
            top_logprobs=top,
            top_ids=ids,
        )


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    # The caching host allocator gives this memory out again only after the copy.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine launches its cycles; None chooses by device.

    Attributes:
        overlap: launch a cycle before the one before it was read; default on a GPU.
        graphs: record cycles as CUDA graphs; default where the session can.
        adaptive: choose the block size cycle by cycle; default with ``speculation="auto"`` on a GPU.
        forced_acceptance: see :func:`trtllm_dflash.runtime.cycle.draft_verify_cycle`.
    """

    overlap: bool | None = None
    graphs: bool | None = None
    adaptive: bool | None = None
    forced_acceptance: float | None = None


def batch_choices(limit: int) -> tuple[int, ...]:
    """Powers of two up to ``limit``, and ``limit``: batches worth measuring."""
    return tuple(sorted({1 << n for n in range(limit.bit_length()) if 1 << n <= limit} | {limit}))


def block_size_choices(limit: int) -> tuple[int, ...]:
    """Block sizes worth telling apart up to ``limit``, 1 and ``limit`` among them."""
    return tuple(sorted({size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if size < limit} | {limit}))


def expected_graphs(session: EngineSession, block_size: int, options: EngineOptions) -> int:
    """CUDA graphs that an engine will record for greedy requests, for the memory plan."""
    if not (session.uses_kernels if options.graphs is None else options.graphs):
        return 0
    limit = session.limits.max_batch_size
    buckets = next((n + 1 for n, size in enumerate(_BUCKETS) if size >= limit), len(_BUCKETS))
    measured = (len(block_size_choices(block_size)) - 1) * len(batch_choices(limit)) if options.adaptive else 0
    return buckets + measured + len(PassSizes(session.limits).all())


class CycleRunner:
    """Launches draft-verify cycles for slots of one :class:`SlotState`.

    Args:
        session, state: what runs, on what. graphs: record CUDA graphs (needs a session on the plugin kernels).
        forced_acceptance: see :func:`draft_verify_cycle`.
    """

    def __init__(
        self, session: EngineSession, state: SlotState, *, graphs: bool, forced_acceptance: float | None = None
    ) -> None:
        self._session = session
        self._state = state
        self._forced = forced_acceptance
        self._pool = GraphPool(session.device) if graphs else None
        self._graphs: dict[GraphKey, CapturedGraph[CycleResult]] = {}
        self._slots: dict[int, tuple[Tensor, list[int]]] = {}
        self._trace: LaunchTrace | None = None

    @property
    def recorded_graphs(self) -> int:
        """How many passes have been recorded so far; recording takes the host far longer than launching."""
        return 0 if self._pool is None else self._pool.captured

    @property
    def pool(self) -> GraphPool | None:
        """Where passes on the same stream may be recorded as well; None when nothing is."""
        return self._pool

    @contextmanager
    def traced(self) -> Iterator[LaunchTrace]:
        """Cycles launched meanwhile are marked in the trace."""
        self._trace = LaunchTrace(self._session.device)
        try:
            yield self._trace
        finally:
            self._trace = None

    def bucket(self, batch: int) -> int:
        """The batch size that ``batch`` requests are padded to."""
        if self._pool is None:
            return batch
        return next((size for size in _BUCKETS if size >= batch), -(-batch // 64) * 64)

    def warm_up(self, block_size: int) -> None:
        """Record the graphs of every batch bucket at ``block_size``, so that no request waits for a recording.

        Raises:
            EngineError: there is not enough memory.
        """
        if self._pool is None:
            return
        for bucket in self.buckets():
            try:
                self.graph(bucket, block_size, SamplingMode())
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"there is no memory left to record a cycle of {bucket} requests",
                    hint="give the engine a smaller KV cache, or build with a smaller --max-batch-size",
                ) from error
        # Each was run once on the recording stream, whose memory nobody else is given.
        torch.cuda.empty_cache()

    def buckets(self) -> list[int]:
        """Every batch size that batches are padded to, ascending."""
        return sorted({self.bucket(batch) for batch in range(1, self._state.idle_slot + 1)})

    def launch(
        self,
        slots: Sequence[int],
        block_size: int,
        page_columns: int,
        mode: SamplingMode,
        masks: Masks | None = None,
    ) -> PendingResult:
        """Queue one cycle for ``slots``; ``page_columns`` is a host-known bound of the pages any of them touches.

        With ``masks`` of grammars the host takes part in the cycle, so it is never a graph.
        """
        if self._pool is None or masks is not None:
            device_slots = upload(slots, torch.int64, self._session.device)
            with self._marked():
                result = self._cycle(device_slots, block_size, page_columns, mode, masks)
            return PendingResult(result)
        bucket = self.bucket(len(slots))
        self._place(slots, bucket)
        graph = self.graph(bucket, block_size, mode)
        with self._marked():
            result = graph.replay()
        return PendingResult(result)

    def _marked(self) -> AbstractContextManager[None]:
        return nullcontext() if self._trace is None else self._trace.cycle()

    def graph(self, bucket: int, block_size: int, mode: SamplingMode) -> CapturedGraph[CycleResult]:
        """The graph of this key, recorded on first use."""
        if self._pool is None:
            raise ValueError("this runner records no graphs")
        key = (bucket, block_size, mode.on_kernels())
        if key not in self._graphs:
            placed, held = self._placed(bucket)
            # Recording runs the cycle once for real: on idle slots that changes nothing.
            placed.fill_(self._state.idle_slot)
            columns = self._state.page_table.shape[1]
            self._graphs[key] = self._pool.capture(lambda: self._cycle(placed, block_size, columns, key[2]))
            placed.copy_(upload(held, torch.int64, self._session.device))
        return self._graphs[key]

    def _cycle(
        self, slots: Tensor, block_size: int, page_columns: int, mode: SamplingMode, masks: Masks | None = None
    ) -> CycleResult:
        return draft_verify_cycle(
            self._session,
            self._state,
            slots,
            block_size,
            page_columns,
            mode,
            forced_acceptance=self._forced,
            masks=masks,
        )

    def _placed(self, bucket: int) -> tuple[Tensor, list[int]]:
        if bucket not in self._slots:
            idle = [self._state.idle_slot] * bucket
            self._slots[bucket] = (upload(idle, torch.int64, self._session.device), idle)
        return self._slots[bucket]

    def _place(self, slots: Sequence[int], bucket: int) -> None:
        """The graph's slot tensor holds ``slots`` and idle ones after them."""
        tensor, held = self._placed(bucket)
        wanted = [*slots, *[self._state.idle_slot] * (bucket - len(slots))]
        if wanted != held:
            tensor.copy_(upload(wanted, torch.int64, self._session.device))
            self._slots[bucket] = (tensor, wanted)

    def recorded(self, function: Callable[[], object]) -> Callable[[], object]:
        """``function`` as a graph where cycles are graphs, else itself."""
        return function if self._pool is None else self._pool.capture(function).replay

    def seconds_per_cycle(
        self, slots: Sequence[int], block_size: int, columns: int, mode: SamplingMode, repeats: int
    ) -> float:
        """Median time of a cycle on ``slots``, launched back to back; runs real cycles on them."""
        return median_seconds(
            lambda: self.launch(slots, block_size, columns, mode), self._session.device, repeats=repeats
        )


def median_seconds(function: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median seconds of ``function``'s work on ``device`` over ``repeats`` runs, after one that is not counted."""
    function()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            started = time.perf_counter()
            function()
            samples.append(time.perf_counter() - started)
        return statistics.median(samples)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    marks[-1].synchronize()
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return statistics.median(milliseconds) / 1e3

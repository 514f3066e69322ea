"""Measuring cycles before anything is served: a table for the adaptive block size, and where a cycle's time goes.

The measurements run real cycles on real slots and pages of an engine that nobody uses yet, and leave it as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.runtime.block_policy import CycleTable
from trtllm_dflash.runtime.cycle import draft_and_select, inject, prepare, publish, settle, verify
from trtllm_dflash.runtime.cycle_runner import CycleRunner, median_seconds
from trtllm_dflash.runtime.launch_trace import LaunchTrace
from trtllm_dflash.runtime.slots import SamplingMode, SlotState, upload

_PLENTY = 1 << 40


class CycleProfiler:
    """Runs cycles on slots that nobody owns.

    Args:
        session, state, runner: an engine's, with nothing running. num_pages: pages of its caches.
    """

    def __init__(self, session: EngineSession, state: SlotState, runner: CycleRunner, num_pages: int) -> None:
        self._session = session
        self._state = state
        self._runner = runner
        self._num_pages = num_pages

    @torch.inference_mode()
    def table(
        self,
        batches: Sequence[int],
        block_sizes: Sequence[int],
        *,
        context: int,
        repeats: int = 11,
        progress: Callable[[int, int], None] | None = None,
    ) -> CycleTable:
        """Median seconds of a greedy cycle for every batch and block size, at about ``context`` cached tokens.

        ``progress`` is called with (measured, in all).
        """
        seconds = {}
        total = len(batches) * len(block_sizes)
        for batch in batches:
            for size in block_sizes:
                # Every cycle moves the slots on; they are set back before they leave the page table.
                at_a_time = max(1, min(repeats, self._most_tokens // size - 3))
                medians = []
                for _ in range(-(-repeats // at_a_time)):
                    slots = self._occupy(batch, context, rows=size * (at_a_time + 3))
                    columns = self._columns(context, rows=size * (at_a_time + 3))
                    medians.append(self._runner.seconds_per_cycle(slots, size, columns, SamplingMode(), at_a_time))
                seconds[batch, size] = statistics.median(medians)
                if progress is not None:
                    progress(len(seconds), total)
        self._vacate()
        return CycleTable(seconds)

    @torch.inference_mode()
    def stages(self, batch: int, block_size: int, *, context: int, repeats: int = 10) -> dict[str, float]:
        """Median seconds of each stage of a greedy cycle, each measured alone: their sum exceeds a whole cycle by what
        launching them apart costs."""
        slots = upload(self._occupy(batch, context, rows=block_size * (repeats + 3)), torch.int64, self._state.device)
        session, state, mode = self._session, self._state, SamplingMode()
        columns = self._columns(context, rows=block_size * (repeats + 3))
        rows = prepare(session, state, slots, block_size, columns)
        draft = draft_and_select(session, rows, block_size, mode)
        verified = verify(session, rows, draft, block_size)
        logits = verified.logits.view(batch, block_size, -1)
        result = settle(session, state, rows, mode, logits, draft)
        stages: dict[str, Callable[[], object]] = {
            "prepare": lambda: prepare(session, state, slots, block_size, columns),
            "draft_and_select": lambda: draft_and_select(session, rows, block_size, mode),
            "verify": lambda: verify(session, rows, draft, block_size),
            "accept": lambda: settle(session, state, rows, mode, logits, draft),
            "inject": lambda: inject(session, rows, verified.features, result.produced, block_size),
            "publish": lambda: publish(session, state, rows, result, mode),
        }
        seconds = {}
        for name, stage in stages.items():
            run = self._runner.recorded(stage)
            seconds[name] = median_seconds(run, state.device, repeats=repeats)
        self._vacate()
        return seconds

    def traced(self) -> AbstractContextManager[LaunchTrace]:
        """Marks every cycle that the engine launches meanwhile; requests may run."""
        return self._runner.traced()

    def _occupy(self, batch: int, context: int, rows: int) -> list[int]:
        """Slots 0 .. batch - 1 with ``context`` cached tokens each, on pages of their own where there are enough."""
        page_tokens = self._session.limits.page_tokens
        each = max(1, min(self._num_pages // batch, self._state.page_table.shape[1]))
        context = max(1, min(context, each * page_tokens - rows))
        for slot in range(batch):
            self._state.set_pages(slot, [(slot * each + page) % self._num_pages for page in range(each)])
        slots = upload(list(range(batch)), torch.int64, self._state.device)
        facts = [[1] * batch, [context] * batch, [_PLENTY] * batch, [0] * batch]
        self._state.set_progress(slots, upload(facts, torch.int64, self._state.device))
        return list(range(batch))

    @property
    def _most_tokens(self) -> int:
        """Positions that a slot's row of the page table covers."""
        return self._state.page_table.shape[1] * self._session.limits.page_tokens

    def _columns(self, context: int, rows: int) -> int:
        """Pages that a measured request touches; without the kernels a pass reads every column it is given."""
        pages = -(-(context + rows) // self._session.limits.page_tokens)
        return min(pages, self._state.page_table.shape[1])

    def _vacate(self) -> None:
        """No slot has anything to emit, nor a page; what the pages hold is finite, and visible to nobody."""
        count = self._state.idle_slot
        slots = upload(list(range(count)), torch.int64, self._state.device)
        self._state.set_progress(slots, upload([[0] * count] * 4, torch.int64, self._state.device))
        for slot in range(count):
            self._state.set_pages(slot, [])
        self._session.clear_pages([self._num_pages])

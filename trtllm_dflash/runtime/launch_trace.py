"""When a device ran each cycle: what is between two cycles is time that the host, or a copy, took from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class CycleSpans:
    """Seconds of consecutive cycles on the device (``busy``) and between them (``idle``, one fewer): results on their
    way to the host, edits of slots, waiting for a launch."""

    busy: list[float]
    idle: list[float]


class LaunchTrace:
    """Marks the begin and end of cycles in stream order.

    Args:
        device: a GPU is asked by events, which cost it a few microseconds each; elsewhere a launch is the work itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times: list[tuple[float, float]] = []

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """Around the launch of one cycle."""
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._times.append((begin, time.perf_counter()))
            return
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        marks[0].record()
        yield
        marks[1].record()
        self._marks.append((marks[0], marks[1]))

    def spans(self) -> CycleSpans:
        """Everything marked so far; waits for its end."""
        if not self._on_gpu:
            busy = [end - begin for begin, end in self._times]
            return CycleSpans(busy, [later[0] - earlier[1] for earlier, later in pairwise(self._times)])
        if self._marks:
            self._marks[-1][1].synchronize()
        busy = [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]
        idle = [earlier[1].elapsed_time(later[0]) / 1e3 for earlier, later in pairwise(self._marks)]
        return CycleSpans(busy, idle)

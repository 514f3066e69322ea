"""How kernels are timed on a GPU, and the copies that their times are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS, ROUNDS = 15, 3
WARM_UP_S = 0.02


class Replayed:
    """Calls recorded as one CUDA graph, each of them once."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        # They hold what the graph reads.
        self._calls = list(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()

    def median_us(self) -> float:
        """Median microseconds of one call."""
        # Clocks fall while the host prepares data: warm up for some milliseconds, not for a number of calls.
        warm_until = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm_until:
            self._graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(self._calls))
        return statistics.median(times)


def least_us(timed: Sequence[Replayed]) -> list[float]:
    """Of each the least of several medians, taken in turn: clocks follow what ran before, and no slow moment decides
    a comparison."""
    rounds = [[one.median_us() for one in timed] for _ in range(ROUNDS)]
    return [min(of_one) for of_one in zip(*rounds, strict=True)]


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one call, see :func:`least_us`."""
    return least_us([Replayed(calls)])[0]


def copy_bytes_per_us(moved_bytes: int) -> float:
    """Bytes read plus written per microsecond by a device copy that moves ``moved_bytes`` in all.

    The faster of the driver's copy and an element-wise kernel; sources and targets rotate beyond the L2 cache.
    """
    copies = max(2, min(16, (1 << 30) // moved_bytes))
    sources = [torch.randn(moved_bytes // 8, device="cuda") for _ in range(copies)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = list(zip(sources, targets, strict=True))
    driver = [lambda s=source, t=target: t.copy_(s) for source, target in pairs]
    kernel = [lambda s=source, t=target: torch.neg(s, out=t) for source, target in pairs]
    return moved_bytes / min(time_us(driver), time_us(kernel))


class Roofline:
    """Copy bandwidth by amount of data: a short copy, too, starts, ramps up and ends."""

    def __init__(self) -> None:
        self.by_megabytes = {size: copy_bytes_per_us(size << 20) for size in (16, 32, 64, 128, 256, 512, 1024, 4096)}

    @property
    def peak(self) -> float:
        return max(self.by_megabytes.values())

    def at(self, moved_bytes: int) -> float:
        """Bytes per microsecond of a copy that moves ``moved_bytes``: measured times, interpolated linearly."""
        megabytes = moved_bytes / (1 << 20)
        sizes = sorted(self.by_megabytes)
        if not sizes[0] <= megabytes < sizes[-1]:
            return self.by_megabytes[sizes[0] if megabytes < sizes[0] else sizes[-1]]
        upper = next(size for size in sizes if size > megabytes)
        lower = sizes[sizes.index(upper) - 1]
        times = [size / self.by_megabytes[size] for size in (lower, upper)]
        share = (megabytes - lower) / (upper - lower)
        return megabytes / (times[0] + share * (times[1] - times[0]))

"""Counts what the engine process does: outcomes, latencies, acceptance. Cheap enough for the engine thread."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping

from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk, RequestMetrics
from trtllm_dflash.serving.metric_definitions import METRICS, Sample

WINDOW_CYCLES = 1000
LOW_ACCEPTANCE = 1.2
_log = logging.getLogger(__name__)

# Counters of the runtime (``EngineStats.counters``) that are counted here already, live or by finer outcome.
_COUNTED_HERE = frozenset(
    {
        "requests_finished",
        "requests_cancelled",
        "requests_failed",
        "requests_refused",
        "requests_expired",
        "prompt_tokens",
        "output_tokens",
        "cycles",
        "drafted_tokens",
        "accepted_tokens",
    }
)


class Histogram:
    """Counts per bucket; ``bounds`` are upper bounds, ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def samples(self, name: str) -> list[Sample]:
        """Cumulative buckets, sum and count, as Prometheus has them."""
        found: list[Sample] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((f"{name}_bucket", {"le": bound}, total))
        return [*found, (f"{name}_sum", {}, self._sum), (f"{name}_count", {}, total)]


class AcceptanceWatch:
    """Acceptance length over the last cycles, and one warning when it stays low.

    A drafter that proposes almost nothing usable still gives right texts, only slowly, so that nobody notices: wrong
    drafter, wrong captured layers, a quantised head, or a chat template that the drafter never saw.

    Args:
        window_cycles: cycles looked back on; no verdict before there are so many.
        warn: takes the warning's text, once each time that the acceptance length becomes low.
    """

    def __init__(self, *, window_cycles: int = WINDOW_CYCLES, warn: Callable[[str], None] = _log.warning) -> None:
        self._window_cycles, self._warn = window_cycles, warn
        self._requests: deque[tuple[int, float]] = deque()
        self._cycles, self._committed = 0, 0.0
        self.low = False

    @property
    def acceptance_length(self) -> float:
        """Tokens per cycle in the window; 0 before the first cycle."""
        return self._committed / self._cycles if self._cycles else 0.0

    def add(self, cycles: int, acceptance_length: float | None) -> None:
        """Count an ended request."""
        if not cycles or acceptance_length is None:
            return
        self._requests.append((cycles, cycles * acceptance_length))
        self._cycles += cycles
        self._committed += cycles * acceptance_length
        while self._requests and self._cycles - self._requests[0][0] >= self._window_cycles:
            old_cycles, old_committed = self._requests.popleft()
            self._cycles -= old_cycles
            self._committed -= old_committed
        if self._cycles < self._window_cycles:
            return
        was_low, self.low = self.low, self.acceptance_length < LOW_ACCEPTANCE
        if self.low and not was_low:
            self._warn(
                f"acceptance length is {self.acceptance_length:.2f} over the last {self._cycles} cycles, expected at "
                f"least {LOW_ACCEPTANCE}: speculation costs more than it brings. Check that the drafter was trained "
                "for this target and its chat template (`trtllm-dflash inspect ENGINES`)"
            )


class EngineMetrics:
    """Counters and histograms of one engine process. Every method may be called from any thread.

    Args:
        info: labels of ``dflash_engine_info``. speculates: whether a low acceptance length is worth a warning.
    """

    def __init__(self, info: Mapping[str, str], *, speculates: bool) -> None:
        self._lock = threading.Lock()
        self._info = dict(info)
        self._watch = AcceptanceWatch() if speculates else None
        self._outcomes: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._per_position: Counter[int] = Counter()
        self._delivered_at: dict[str, float] = {}
        self._histograms = {name: Histogram(metric.buckets) for name, metric in METRICS.items() if metric.buckets}

    def refused(self, code: str) -> None:
        """A request was not queued; ``code`` is the status word that the client gets."""
        with self._lock:
            self._outcomes["refused"] += 1
            self._errors[code] += 1

    def failed(self, request_id: str, code: str, last: OutputChunk | None = None) -> None:
        """A queued request ended in an error; ``last`` tells the work that it took, None for work not to be counted."""
        with self._lock:
            self._delivered_at.pop(request_id, None)
            self._outcomes["error"] += 1
            self._errors[code] += 1
            if last is not None and last.metrics is not None:
                # Tokens before the last were counted as they came. No latencies: a failure's is not a service time.
                self._totals["dflash_output_tokens_total"] += len(last.token_ids)
                self._count_work(last.metrics)

    def delivered(self, chunk: OutputChunk) -> None:
        """New output of a request (on the engine thread)."""
        now = time.monotonic()
        tokens = len(chunk.token_ids)
        with self._lock:
            before = self._delivered_at.get(chunk.request_id)
            if tokens:
                self._totals["dflash_output_tokens_total"] += tokens
                if before is not None:
                    self._histograms["dflash_inter_token_seconds"].observe((now - before) / tokens, tokens)
                self._delivered_at[chunk.request_id] = now
            if chunk.finish_reason is not None:
                self._delivered_at.pop(chunk.request_id, None)
                self._outcomes[chunk.finish_reason] += 1
                if chunk.metrics is not None:
                    self._count_work(chunk.metrics)
                    self._count_latencies(chunk.metrics)

    def samples(self, stats: EngineStats) -> list[Sample]:
        """Everything as of now; ``stats`` is the runtime's own snapshot."""
        with self._lock:
            found: list[Sample] = [("dflash_engine_info", self._info, 1)]
            found += [("dflash_requests_total", {"outcome": name}, count) for name, count in self._outcomes.items()]
            found += [("dflash_errors_total", {"code": name}, count) for name, count in self._errors.items()]
            found += [(name, {}, count) for name, count in self._totals.items()]
            found += [
                ("dflash_accepted_tokens_per_position_total", {"position": str(position)}, count)
                for position, count in sorted(self._per_position.items())
            ]
            if self._watch is not None:
                found.append(("dflash_acceptance_length", {}, round(self._watch.acceptance_length, 4)))
                found.append(("dflash_low_acceptance", {}, int(self._watch.low)))
            for name, histogram in self._histograms.items():
                found += histogram.samples(name)
        found += [
            ("dflash_kv_pages", {"state": "free"}, stats.pages_free),
            ("dflash_kv_pages", {"state": "used"}, stats.pages_used),
            ("dflash_kv_pages", {"state": "cached"}, stats.pages_cached),
            ("dflash_requests_running", {}, stats.running),
            ("dflash_requests_waiting", {}, stats.waiting),
        ]
        found += [
            (f"dflash_{name}_total", {}, count) for name, count in stats.counters.items() if name not in _COUNTED_HERE
        ]
        return found

    def _count_work(self, metrics: RequestMetrics) -> None:
        totals = self._totals
        totals["dflash_prompt_tokens_total"] += metrics.prompt_tokens
        totals["dflash_cycles_total"] += metrics.cycles
        totals["dflash_drafted_tokens_total"] += metrics.drafted_tokens
        totals["dflash_accepted_tokens_total"] += metrics.accepted_tokens
        # A cycle that kept j drafts accepted positions 1..j.
        kept_at_least = 0
        for position in range(len(metrics.accepted_histogram) - 1, 0, -1):
            kept_at_least += metrics.accepted_histogram[position]
            self._per_position[position] += kept_at_least
        if self._watch is not None:
            self._watch.add(metrics.cycles, metrics.acceptance_length)

    def _count_latencies(self, metrics: RequestMetrics) -> None:
        if metrics.completion_tokens:
            # Without a first token these are the time until the request was given up, not a latency.
            self._histograms["dflash_queue_seconds"].observe(metrics.queue_s)
            self._histograms["dflash_time_to_first_token_seconds"].observe(metrics.time_to_first_token_s)
            self._histograms["dflash_request_seconds"].observe(metrics.elapsed_s)

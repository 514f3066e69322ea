"""An endpoint whose requests take a known time: what the load generator and the figures are tested with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from trtllm_dflash.bench.records import RequestRecord, digest_of
from trtllm_dflash.config.sampling import SamplingParams


class TimedEndpoint:
    """Every request brings ``events`` events of ``tokens_per_event`` tokens, ``gap_s`` apart.

    Attributes:
        seen: (prompt, params) of every request. most_at_once: most requests that ran at the same time.
    """

    def __init__(
        self, *, events: int = 4, gap_s: float = 0.01, tokens_per_event: int = 2, fail: Sequence[Any] = ()
    ) -> None:
        self._events, self._gap_s, self._tokens, self._fail = events, gap_s, tokens_per_event, fail
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        with self._lock:
            self.seen.append((prompt, params))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        record.start = time.perf_counter()
        for _ in range(self._events):
            if stop.wait(self._gap_s):
                break
            record.events.append((time.perf_counter(), self._tokens))
        record.end = time.perf_counter()
        if prompt in self._fail:
            record.error = f"{prompt} is refused"
        record.completion_tokens = int(record.tokens)
        record.cycles = self._events - 1
        record.accepted = (self._tokens - 1) * (self._events - 1)
        record.drafted = 7 * (self._events - 1)
        histogram = [0] * 8
        histogram[self._tokens - 1] = self._events - 1
        record.histogram = tuple(histogram)
        record.digest = digest_of(prompt)
        with self._lock:
            self._now -= 1

    def stop_all(self) -> None:
        pass

"""A continuous-batching engine in simulated time: what its figures must be follows from its service times."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.bench.records import RequestRecord, digest_of
from trtllm_dflash.config.sampling import SamplingParams


@dataclass
class _Running:
    record: RequestRecord
    left: int
    cycles: int = 0
    is_prefilled: bool = False
    is_done: bool = False


class SimulatedEngine:
    """Each turn prefills who waits, one after the other while everybody waits, then runs one cycle for all.

    A request brings its first token with its prefill and up to 1 + j more in each cycle, j drawn with the weights of
    ``histogram``. No user pauses between two requests. Time stands still until every user has a request in flight,
    so that neither threads nor the machine's load have any effect.

    Args:
        users: of the closed loop. prefill_s: of one request. cycle_s: of a cycle, by the number of requests in it.
        histogram: weights of drafts kept; (1,) is plain decoding.
        prefills_per_turn: at most so many; None is all who wait.
    """

    def __init__(
        self,
        users: int,
        *,
        prefill_s: float,
        cycle_s: Callable[[int], float],
        histogram: Sequence[float] = (1.0,),
        prefills_per_turn: int | None = None,
        seed: int = 11,
    ) -> None:
        self._users, self._prefill_s, self._cycle_s = users, prefill_s, cycle_s
        self._prefills_per_turn = prefills_per_turn or users
        self._histogram = list(histogram)
        self._draw = random.Random(seed)
        self._clock = 0.0
        self._live: list[_Running] = []
        self._turn = threading.Condition()

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        assert params.max_tokens is not None
        with self._turn:
            mine = _Running(record, params.max_tokens)
            record.start = self._clock
            self._live.append(mine)
            while not mine.is_done and not stop.is_set():
                if len(self._live) == self._users:
                    self._run_until_one_has_ended()
                    self._turn.notify_all()
                else:
                    self._turn.wait()
            if not mine.is_done:
                record.end = self._clock
        record.digest = digest_of(prompt)

    def stop_all(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def request_s(self, max_tokens: int) -> float:
        """Mean seconds of a request of ``max_tokens`` under full load: its cycles, and everybody's prefills.

        While one request runs, each of the others ends and is prefilled once on average. Not for so many prefills that
        requests wait longer than one turn for their own.
        """
        mean_cycles = [0.0] * max_tokens
        total = sum(self._histogram)
        for left in range(1, max_tokens):
            mean_cycles[left] = 1.0 + sum(
                weight / total * mean_cycles[max(0, left - 1 - kept)] for kept, weight in enumerate(self._histogram)
            )
        return mean_cycles[max_tokens - 1] * self._cycle_s(self._users) + self._users * self._prefill_s

    def _run_until_one_has_ended(self) -> None:
        while not any(running.is_done for running in self._live):
            waiting = [running for running in self._live if not running.is_prefilled]
            for new in waiting[: self._prefills_per_turn]:
                self._clock += self._prefill_s
                new.is_prefilled = True
                self._emit(new, 1)
            still = [running for running in self._live if running.is_prefilled and running.left]
            if still:
                self._clock += self._cycle_s(len(still))
            for running in still:
                running.cycles += 1
                kept = self._draw.choices(range(len(self._histogram)), self._histogram)[0]
                self._emit(running, min(running.left, 1 + kept))
        self._live = [running for running in self._live if not running.is_done]

    def _emit(self, running: _Running, tokens: int) -> None:
        running.left -= tokens
        record = running.record
        record.events.append((self._clock, tokens))
        if running.left == 0:
            running.is_done = True
            record.end, record.finish_reason = self._clock, "length"
            record.completion_tokens, record.cycles = int(record.tokens), running.cycles
            record.accepted, record.drafted = int(record.tokens) - 1 - running.cycles, 0

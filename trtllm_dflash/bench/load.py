"""Load: a constant number of users, or arrivals at a rate, kept up around the measured requests.

The measured requests are a fixed list. Before them comes a warm-up, a request of another length for every user, and
more requests until the last of these has ended: the first wave, in which all prefills come at once, is over then, and
users are out of step. After them come cool-down requests that are cut off when the last measured one has ended. Every
measured request ran under full load, and no figure depends on how the load rose or fell.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtllm_dflash.bench.endpoints import Endpoint, per_request_params
from trtllm_dflash.bench.records import Phase, RequestRecord
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import ConfigError

Progress = Callable[[str, int, int], None]

MAX_OPEN_REQUESTS = 1024
# A user whose request failed waits before the next, twice as long after each failure in a row: a server that refuses
# everything is not asked as fast as it can refuse.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# Every user is a thread; an operating system allows some ten thousand of them.
MAX_USERS = 10_000


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        concurrency: requests in flight (closed loop), or the most of them when ``request_rate`` is set.
        request_rate: mean arrivals per second, Poisson; None for a closed loop.
        requests: measured requests. warm_up: requests of staggered lengths before them; None takes ``concurrency``.
            Until all of them have ended, who ended sends whole requests that are not measured either.
        seed: of the arrival times.
    """

    concurrency: int | None
    request_rate: float | None
    requests: int
    warm_up: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is None and self.request_rate is None:
            raise ConfigError("no load: expected a concurrency or a request rate")
        if self.concurrency is not None and not 1 <= self.concurrency <= MAX_USERS:
            raise ConfigError(f"concurrency is {self.concurrency}, expected 1 to {MAX_USERS}")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request rate is {self.request_rate}, expected more than 0 per second")
        if self.requests < 1:
            raise ConfigError(f"measured requests are {self.requests}, expected at least 1")
        if self.warm_up is not None and self.warm_up < 0:
            raise ConfigError(f"warm-up requests are {self.warm_up}, expected 0 or more")

    @property
    def warm_up_requests(self) -> int:
        """Requests of staggered lengths that begin before all others."""
        return (self.concurrency or 1) if self.warm_up is None else self.warm_up


@dataclass(frozen=True)
class LoadResult:
    """Records of all requests.

    Attributes:
        window: (begin, end) of the measured part in ``time.perf_counter`` seconds: from sending the first measured
            request to the end of the last. is_open_loop: requests arrived at a rate, whoever had ended.
    """

    records: tuple[RequestRecord, ...]
    window: tuple[float, float]
    is_open_loop: bool = False

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """Records of the measured requests."""
        return tuple(record for record in self.records if record.phase == "measured")


def run_load(
    endpoint: Endpoint,
    prompts: Sequence[Any],
    params: SamplingParams,
    load: Load,
    *,
    progress: Progress | None = None,
    on_measured: Callable[[str], None] | None = None,
) -> LoadResult:
    """Put ``load`` on ``endpoint``.

    Args:
        prompts: taken in order and again from the start when there are fewer than measured requests; all others
            take them from the end backwards.
        params: of every request (a seed is offset by the request's index).
        progress: told (label, measured requests ended, measured requests).
        on_measured: told "begin" when the first measured request is sent and "end" when the last has ended.

    Raises:
        ConfigError: no prompts.
    """
    if not prompts:
        raise ConfigError("no prompts to send")
    run = _Run(endpoint, prompts, params, load, progress, on_measured)
    if load.request_rate is None:
        run.closed_loop()
    else:
        run.open_loop()
    return run.result()


class _Run:
    """State of one load: the queue of requests, and who has ended."""

    def __init__(
        self,
        endpoint: Endpoint,
        prompts: Sequence[Any],
        params: SamplingParams,
        load: Load,
        progress: Progress | None,
        on_measured: Callable[[str], None] | None,
    ) -> None:
        self._endpoint, self._prompts, self._params, self._load = endpoint, prompts, params, load
        self._progress, self._on_measured = progress, on_measured
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._queue = self._requests()
        self._records: list[RequestRecord] = []
        self._ended = 0
        self._warming_up = load.warm_up_requests
        self._failure: BaseException | None = None

    def closed_loop(self) -> None:
        """``concurrency`` workers, each of which sends its next request when its last has ended."""
        assert self._load.concurrency is not None
        workers = [
            threading.Thread(target=self._work, name=f"load-{number}", daemon=True)
            for number in range(self._load.concurrency)
        ]
        self._join(workers)

    def open_loop(self) -> None:
        """Poisson arrivals; one that finds ``concurrency`` requests in flight waits for its turn."""
        assert self._load.request_rate is not None
        draw = random.Random(self._load.seed)
        room = threading.Semaphore(self._load.concurrency or MAX_OPEN_REQUESTS)

        def one(record: RequestRecord, params: SamplingParams) -> None:
            try:
                self._send(record, params)
            finally:
                room.release()

        def arrivals() -> None:
            started: list[threading.Thread] = []
            due = time.perf_counter()
            while not self._stop.is_set():
                due += draw.expovariate(self._load.request_rate or 1.0)
                if self._stop.wait(max(0.0, due - time.perf_counter())):
                    break
                while not room.acquire(timeout=0.2):
                    if self._stop.is_set():
                        break
                if self._stop.is_set():
                    break
                following = self._next()
                if following is None:
                    break
                started.append(threading.Thread(target=one, args=following, daemon=True))
                started[-1].start()
            for thread in started:
                thread.join()

        self._join([threading.Thread(target=arrivals, name="arrivals", daemon=True)])

    def result(self) -> LoadResult:
        """Records and window, after the loop has ended."""
        if self._failure is not None:
            raise self._failure
        measured = [record for record in self._records if record.phase == "measured"]
        window = (min(record.start for record in measured), max(record.end for record in measured))
        return LoadResult(tuple(self._records), window, is_open_loop=self._load.request_rate is not None)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                # A bounded wait can be interrupted by Ctrl-C on every platform.
                while thread.is_alive():
                    thread.join(timeout=0.5)
        except BaseException:
            self._stop.set()
            self._endpoint.stop_all()
            raise

    def _work(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            following = self._next()
            if following is None:
                return
            self._send(*following)
            if following[0].error is None:
                pause = FIRST_PAUSE_S
            else:
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _send(self, record: RequestRecord, params: SamplingParams) -> None:
        try:
            self._endpoint.run(self._prompts[record.index], params, record, self._stop)
        except BaseException as failure:
            # A fault of the client itself: nothing that follows would mean anything.
            self._failure = failure
            self._stop.set()
            self._endpoint.stop_all()
            return
        if record.phase == "measured":
            self._count()
        elif record.phase == "warm-up":
            with self._lock:
                self._warming_up -= 1

    def _next(self) -> tuple[RequestRecord, SamplingParams] | None:
        with self._lock:
            following = next(self._queue, None)
            if following is None:
                return None
            phase, index, number = following
            record = RequestRecord(index=index, phase=phase)
            self._records.append(record)
        if phase == "measured" and number == 0 and self._on_measured is not None:
            self._on_measured("begin")
        params = per_request_params(self._params, number)
        if phase == "warm-up" and params.max_tokens is not None:
            params = replace(params, max_tokens=self._staggered(params.max_tokens, number), min_tokens=0)
        return record, params

    def _staggered(self, max_tokens: int, number: int) -> int:
        """Warm-up lengths differ, or requests of one length would begin and end in step for ever.

        What is left of a user's request at a random moment is uniform between nothing and all of it.
        """
        users = self._load.concurrency or 1
        return max(1, max_tokens * (number % users + 1) // users)

    def _count(self) -> None:
        with self._lock:
            self._ended += 1
            ended = self._ended
        if self._progress is not None:
            self._progress("measured requests", ended, self._load.requests)
        if ended == self._load.requests:
            if self._on_measured is not None:
                self._on_measured("end")
            self._stop.set()
            self._endpoint.stop_all()

    def _requests(self) -> Iterator[tuple[Phase, int, int]]:
        """(phase, prompt index, number within the phase), without end."""
        count = len(self._prompts)
        backwards = itertools.cycle(range(count - 1, -1, -1))
        for number in range(self._load.warm_up_requests):
            yield "warm-up", next(backwards), number
        for number in itertools.count():
            if not self._warming_up:
                break
            yield "settling", next(backwards), number
        for number in range(self._load.requests):
            yield "measured", number % count, number
        for number in itertools.count():
            yield "cool-down", next(backwards), number

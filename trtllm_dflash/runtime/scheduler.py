"""Who runs, and on which pages: the waiting queue, admission, growth, preemption and the way back of pages.

One order decides everything: ``Request.rank``, the time of arrival moved ahead by the request's priority. Waiting
requests are admitted in this order and running ones are preempted from its end, so the first of all unfinished requests
always makes progress: nobody waits for ever, whatever arrives later, and requests cannot wait for each other.

Pages are reserved as a request grows. When none are left, cached pages are evicted, then the last running request in
the order is preempted: it gives its pages back and waits again, at the place its rank gives it, and is later computed
from its prompt and what it had emitted. Its next cycle starts where the last delivered one ended, with the same anchor
and the same random numbers, so its output is what it would have been.

Tokens, slots and pages only: this file knows neither tensors nor networks. Every public method may be called from any
thread.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash.errors import EngineError, QueueFullError, RequestError
from trtllm_dflash.runtime.outputs import ErrorKind, FinishReason
from trtllm_dflash.runtime.pages import PagePool
from trtllm_dflash.runtime.prefix_cache import PrefixCache
from trtllm_dflash.runtime.request import Request, RequestSpec

_FINISHES_REMEMBERED = 32
_RETRY_AFTER_S = (1.0, 60.0)


@dataclass(frozen=True)
class AdmissionLimits:
    """What an operator may bound; None is unlimited.

    Attributes:
        max_queue: waiting requests; one more is refused with ``QueueFullError``.
        max_tokens_in_flight: prompt and output tokens that running requests may come to hold together.
        max_running: requests that run together, where that is to be fewer than the engine has slots.
    """

    max_queue: int | None = None
    max_tokens_in_flight: int | None = None
    max_running: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_tokens_in_flight", "max_running"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(name, value, "an integer >= 1, or None for no limit")


@dataclass(frozen=True)
class PageCounts:
    """``total = free + used + cached``; cached pages are held by the prefix cache alone and can be evicted."""

    total: int
    free: int
    used: int
    cached: int


@dataclass(frozen=True)
class Ending:
    """A request that ends outside a pass, and how."""

    request: Request
    reason: FinishReason
    error: str | None = None
    kind: ErrorKind = "engine"


class Scheduler:
    """Waiting and running requests, their slots and their pages.

    Args:
        slots: requests that may run together. num_pages, page_tokens: the KV caches' pages.
        growth_tokens: positions beyond the known context that a pass may need; pages for them are kept in sight at
        admission. prefix_cache: keep the pages of finished requests for others. limits: see there.
    """

    def __init__(
        self,
        *,
        slots: int,
        num_pages: int,
        page_tokens: int,
        growth_tokens: int,
        prefix_cache: bool = True,
        limits: AdmissionLimits | None = None,
    ) -> None:
        self._page_tokens = page_tokens
        self._growth_tokens = growth_tokens
        self._limits = limits or AdmissionLimits()
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(self._pool, page_tokens) if prefix_cache else None
        self._free_slots = list(range(min(slots, self._limits.max_running or slots) - 1, -1, -1))
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._finishes: deque[float] = deque(maxlen=_FINISHES_REMEMBERED)
        # Waiting and running requests that may end outside a pass; the queue may be too long to look at each.
        self._watched: set[Request] = set()
        self._lock = threading.RLock()
        self.counters = dict.fromkeys(
            ("preemptions", "prefix_lookup_tokens", "prefix_hit_tokens", "requests_refused", "requests_expired"), 0
        )

    @property
    def running(self) -> list[Request]:
        """Admitted requests, in order of admission (a copy)."""
        with self._lock:
            return list(self._running)

    @property
    def waiting(self) -> list[Request]:
        """Requests without a slot, the next one first (a copy)."""
        with self._lock:
            return list(self._waiting)

    def occupancy(self) -> tuple[int, int, int]:
        """How many wait, run, and how many slots are free."""
        with self._lock:
            return len(self._waiting), len(self._running), len(self._free_slots)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of pages that nobody reads: their contents are about to change."""
        with self._lock:
            if self._cache is not None:
                self._cache.evict(self._cache.size)

    def enqueue(self, *requests: Request) -> None:
        """Let requests wait for their turn: all of them, before anybody is admitted, or none.

        Raises:
            RequestError: one could never run, or an id is in use. QueueFullError: more would wait than may.
        """
        for request in requests:
            self._check_possible(request.spec)
        with self._lock:
            new: dict[str, Request] = {}
            for request in requests:
                request_id = request.spec.request_id
                if request_id in self._by_id or request_id in new:
                    raise RequestError("request_id", request_id, "an id that is not in use")
                new[request_id] = request
            limit = self._limits.max_queue
            # In front of the last of them; who will be admitted at once does not wait.
            waiting = len(self._waiting) - len(self._free_slots) + len(requests) - 1
            if limit is not None and waiting >= limit:
                self.counters["requests_refused"] += len(requests)
                raise QueueFullError(waiting, limit, self._retry_after_s(waiting))
            self._by_id |= new
            for request in requests:
                if request.deadline is not None or request.grammar is not None:
                    self._watched.add(request)
                self._insert(request)

    def cancel(self, request_id: str) -> bool:
        """Mark an unfinished request, which ends before the next pass. False when there is none of this id."""
        with self._lock:
            request = self._by_id.get(request_id)
            if request is None:
                return False
            request.cancelled = True
            self._watched.add(request)
            return True

    def ended(self, now: float) -> list[Ending]:
        """Requests that must end before the next pass. ``now`` is a ``time.perf_counter()`` reading."""
        with self._lock:
            # A running request may also be marked by its own delivery.
            looked_at = self._watched.union(one for one in self._running if one.cancelled)
            found: list[Ending] = []
            for request in sorted(looked_at, key=lambda one: one.rank):
                if request.cancelled:
                    found.append(Ending(request, "cancelled"))
                elif request.failure is not None:
                    found.append(Ending(request, "error", request.failure, request.failure_kind))
                elif request.deadline is not None and now >= request.deadline:
                    self.counters["requests_expired"] += not request.is_expired
                    request.is_expired = True
                    state = "waiting" if request.slot is None else "running"
                    text = f"deadline_s: {request.spec.deadline_s:g} s passed while the request was {state}"
                    found.append(Ending(request, "error", f"{text}, {request.emitted} tokens emitted", "deadline"))
            return found

    def next_deadline(self) -> float | None:
        """The earliest deadline of all unfinished requests, a ``time.perf_counter()`` reading."""
        with self._lock:
            return min((one.deadline for one in self._watched if one.deadline is not None), default=None)

    def admit(self, now: float) -> list[Request]:
        """Give slots and pages to waiting requests, in their order, as far as both last.

        Returns:
            the requests admitted now. Of each, ``slot`` and ``pages`` are set, and ``prefilled`` is the number of
            leading positions whose K/V the prefix cache already holds. A request that was preempted before comes
            with ``emitted > 0``: its prefill computes ``prefill_ids`` without drawing a token.
        """
        with self._lock:
            for request in self._running:
                self._share(request)
            admitted: list[Request] = []
            if not self._free_slots:
                return admitted
            for request in list(self._waiting):
                if not self._free_slots:
                    break
                if not request.is_prepared or self._is_better_off_waiting(request):
                    continue
                if not self._start(request, now):
                    break
                admitted.append(request)
            return admitted

    def reserve(self, request: Request, tokens: int) -> bool:
        """Make pages for the first ``tokens`` positions of a running request exist (its extent at most).

        Evicts cached pages and then preempts running requests behind it in the order, as needed.

        Returns:
            False when the request itself was the last in the order and has been preempted.
        """
        with self._lock:
            if request.slot is None:
                raise EngineError(f"request {request.spec.request_id} does not run, so it cannot grow")
            needed = self._pages_of(min(tokens, request.extent)) - len(request.pages)
            while needed > 0 and not self._make_free(needed):
                victim = max(self._running, key=lambda one: one.rank)
                self._preempt(victim)
                if victim is request:
                    return False
            if needed > 0:
                request.pages.extend(self._pool.take(needed))
            return True

    def retire(self, request: Request, committed_tokens: int) -> list[int]:
        """The end of a request: slot and pages come back, once.

        Args:
            committed_tokens: leading positions whose K/V is known to be right in both caches; full pages of them may
            be used by others. 0 after a fault.

        Returns:
            pages that were this request's alone and are free now (to be cleared when they may hold NaN).
        """
        with self._lock:
            request_id = request.spec.request_id
            if self._by_id.pop(request_id, None) is None:
                raise EngineError(f"request {request_id} was retired twice")
            self._watched.discard(request)
            if request.slot is None:
                self._waiting.remove(request)
                return []
            self._finishes.append(time.perf_counter())
            return self._take_back(request, committed_tokens)

    def page_counts(self) -> PageCounts:
        """How many pages are in which state."""
        with self._lock:
            cached = 0 if self._cache is None else self._cache.idle
            free = self._pool.free
            return PageCounts(self._pool.total, free, self._pool.total - free - cached, cached)

    def snapshot(self) -> dict[str, int]:
        """Monotonic counters of this scheduler."""
        with self._lock:
            return {**self.counters, "pages_evicted": 0 if self._cache is None else self._cache.evicted}

    # ---- admission

    def _check_possible(self, spec: RequestSpec) -> None:
        extent = len(spec.prompt) + spec.max_output_tokens
        asked = spec.max_output_tokens if spec.params.max_tokens is None else spec.params.max_tokens
        if self._pages_of(extent) > self._pool.total:
            raise RequestError(
                "max_tokens",
                asked,
                f"prompt ({len(spec.prompt)} tokens) and output within the KV cache of "
                f"{self._pool.total * self._page_tokens} tokens",
                hint="ask for fewer tokens, or give the engine a larger KV cache",
            )
        limit = self._limits.max_tokens_in_flight
        if limit is not None and extent > limit:
            raise RequestError(
                "max_tokens",
                asked,
                f"prompt ({len(spec.prompt)} tokens) and output within max_tokens_in_flight = {limit}",
                hint="ask for fewer tokens, or allow more in flight",
            )

    def _insert(self, request: Request) -> None:
        bisect.insort(self._waiting, request, key=lambda one: one.rank)

    def _start(self, request: Request, now: float) -> bool:
        """Admit one request if slots, pages and the limit of tokens allow."""
        limit = self._limits.max_tokens_in_flight
        if limit is not None and sum(one.extent for one in self._running) + request.extent > limit:
            return False
        tokens = request.prefill_ids
        chain = (
            [] if self._cache is None else self._cache.match(tokens, self._reusable_pages(request), request.spec.salt)
        )
        needed = self._pages_of(min(len(tokens) + self._growth_tokens, request.extent)) - len(chain)
        # A page for each that still grows: to admit someone only to preempt him at once would be work for nothing.
        headroom = sum(len(one.pages) < self._pages_of(one.extent) for one in self._running)
        idle = 0 if self._cache is None else self._cache.idle - sum(node.users == 0 for node in chain)
        if needed + headroom > self._pool.free + idle:
            return False
        if self._cache is not None:
            self._cache.hold(chain)
            self.counters["prefix_lookup_tokens"] += len(tokens)
            self.counters["prefix_hit_tokens"] += len(chain) * self._page_tokens
        self._make_free(needed)
        request.chain = chain
        request.pages = [*(node.page for node in chain), *self._pool.take(needed)]
        request.prefilled = len(chain) * self._page_tokens
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = request.prefilled
        request.slot = self._free_slots.pop()
        request.incarnation += 1
        self._waiting.remove(request)
        self._running.append(request)
        return True

    def _reusable_pages(self, request: Request) -> int:
        """Full pages that may come from the cache; the last prompt token is computed, for its logits are needed."""
        tokens = len(request.prefill_ids)
        return (tokens if request.emitted else tokens - 1) // self._page_tokens

    def _is_better_off_waiting(self, request: Request) -> bool:
        """Whether a running request computes a prefix that this one could have without computing it.

        It waits only for a prefill of which at least half is its own prefix, so waiting costs at most what it saves.
        """
        if self._cache is None:
            return False
        tokens, reusable = request.prefill_ids, self._reusable_pages(request)
        known = len(self._cache.match(tokens, reusable, request.spec.salt))
        for other in self._running:
            if other.is_shared or other.spec.salt != request.spec.salt:
                continue
            theirs = other.prefill_ids
            common = _common_pages(tokens, theirs, self._page_tokens, min(reusable, len(theirs) // self._page_tokens))
            if common > known and 2 * (common - known) * self._page_tokens >= len(theirs) - other.prefilled:
                return True
        return False

    def _retry_after_s(self, waiting: int) -> float:
        """When a place in the queue is likely to be free, from the pace of the last requests that ended."""
        shortest, longest = _RETRY_AFTER_S
        if len(self._finishes) < 2:
            return shortest
        pace_s = (self._finishes[-1] - self._finishes[0]) / (len(self._finishes) - 1)
        return min(max(shortest, pace_s * (waiting - (self._limits.max_queue or 0) + 1)), longest)

    # ---- pages

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _make_free(self, count: int) -> bool:
        """Whether ``count`` pages are free, after evicting cached ones if need be."""
        missing = count - self._pool.free
        if missing > 0 and self._cache is not None:
            missing -= self._cache.evict(missing)
        return missing <= 0

    def _share(self, request: Request) -> None:
        """Let others use the prompt of a running request, once its first token has shown that its K/V are numbers."""
        if self._cache is None or request.is_shared or not request.emitted or not request.is_prefilled:
            return
        request.is_shared = True
        full = len(request.prefill_ids) // self._page_tokens
        own = request.pages[len(request.chain) : full]
        request.chain = [*request.chain, *self._cache.share(request.prefill_ids, request.chain, own, request.spec.salt)]

    def _preempt(self, victim: Request) -> None:
        self.counters["preemptions"] += 1
        victim.preemptions += 1
        self._take_back(victim, victim.committed_host)
        victim.go_back()
        self._insert(victim)

    def _take_back(self, request: Request, committed_tokens: int) -> list[int]:
        self._running.remove(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        chain, pages = request.chain, request.pages
        request.chain, request.pages, request.is_shared = [], [], False
        kept = len(chain)
        if self._cache is not None:
            tokens = request.sequence
            kept = max(kept, min(committed_tokens, len(tokens)) // self._page_tokens)
            self._cache.leave(tokens, chain, pages[len(chain) : kept], request.spec.salt)
        self._pool.give(pages[kept:])
        return pages[kept:]


def _common_pages(one: Sequence[int], other: Sequence[int], page_tokens: int, limit: int) -> int:
    """How many full pages two sequences share at their start, at most ``limit``."""
    for index in range(limit):
        start, end = index * page_tokens, (index + 1) * page_tokens
        if one[start:end] != other[start:end]:
            return index
    return limit

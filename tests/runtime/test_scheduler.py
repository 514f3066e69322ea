"""The scheduler alone: order, pages, preemption and limits, driven without an engine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_requests import Clock, make_request, make_scheduler, occupied

from trtllm_dflash.errors import EngineError, QueueFullError, RequestError
from trtllm_dflash.runtime.request import PRIORITY_STEP_S, JointMode, Request
from trtllm_dflash.runtime.scheduler import AdmissionLimits, Scheduler
from trtllm_dflash.runtime.slots import SamplingMode


def admit(scheduler: Scheduler) -> list[str]:
    return [request.spec.request_id for request in scheduler.admit(0.0)]


def emit(request: Request, count: int) -> None:
    """The prefill is done and ``count`` tokens were emitted."""
    request.prefilled = len(request.prefill_ids)
    request.output.extend(range(1000, 1000 + count))


def test_no_more_run_together_than_the_operator_allows() -> None:
    scheduler, clock = make_scheduler(slots=4, limits=AdmissionLimits(max_running=2)), Clock()
    requests = [make_request(clock, 5) for _ in range(3)]
    for request in requests:
        scheduler.enqueue(request)
    assert admit(scheduler) == [request.spec.request_id for request in requests[:2]]
    scheduler.retire(requests[0], 0)
    assert admit(scheduler) == [requests[2].spec.request_id]


def test_admission_is_in_order_of_arrival_and_stops_at_the_first_that_does_not_fit() -> None:
    """A small request behind a large one does not overtake it, or the large one might never run."""
    scheduler = make_scheduler(slots=4, num_pages=10)
    clock = Clock()
    first, large, small = (make_request(clock, tokens) for tokens in (60, 70, 5))
    for request in (first, large, small):
        scheduler.enqueue(request)
    assert admit(scheduler) == [first.spec.request_id]
    scheduler.retire(first, 0)
    assert admit(scheduler) == [large.spec.request_id]


def test_a_priority_is_worth_a_time_of_waiting() -> None:
    scheduler, clock = make_scheduler(slots=1), Clock()
    old, urgent, older = (make_request(clock, 4, priority=p, at=at) for p, at in ((0, 5.0), (1, 12.0), (0, 1.0)))
    for request in (old, urgent, older):
        scheduler.enqueue(request)
    # One priority moves `urgent` ahead of everyone who arrived less than a step before it.
    assert PRIORITY_STEP_S == 10.0
    order = []
    while scheduler.waiting:
        (request,) = scheduler.admit(20.0)
        order.append(request)
        scheduler.retire(request, 0)
    assert order == [older, urgent, old]


def test_no_priority_starves_anybody() -> None:
    """A stream of the highest priority arrives for ever; the lowest is served when it has waited its twenty steps."""
    scheduler, clock = make_scheduler(slots=1), Clock()
    patient = make_request(clock, 4, priority=-10, at=0.0)
    scheduler.enqueue(patient)
    for second in range(1, 1000):
        scheduler.enqueue(make_request(clock, 4, priority=10, at=float(second)))
        (served,) = scheduler.admit(float(second))
        scheduler.retire(served, 0)
        if served is patient:
            break
    assert second == 200


def test_full_queue_is_refused_with_a_time_to_come_back() -> None:
    scheduler, clock = make_scheduler(slots=1, limits=AdmissionLimits(max_queue=2)), Clock()
    for _ in range(3):
        scheduler.enqueue(make_request(clock, 4))
    with pytest.raises(QueueFullError, match=r"got 2 waiting requests, expected fewer than max_queue=2") as refusal:
        scheduler.enqueue(make_request(clock, 4))
    assert 1.0 <= refusal.value.retry_after_s <= 60.0
    assert scheduler.snapshot()["requests_refused"] == 1
    (first,) = scheduler.admit(0.0)
    scheduler.retire(first, 0)
    scheduler.enqueue(make_request(clock, 4))


def test_tokens_in_flight_are_bounded() -> None:
    scheduler, clock = make_scheduler(slots=8, limits=AdmissionLimits(max_tokens_in_flight=100)), Clock()
    requests = [make_request(clock, 20, max_output_tokens=20) for _ in range(4)]
    for request in requests:
        scheduler.enqueue(request)
    assert admit(scheduler) == [request.spec.request_id for request in requests[:2]]
    scheduler.retire(requests[0], 0)
    assert admit(scheduler) == [requests[2].spec.request_id]
    with pytest.raises(RequestError, match="max_tokens_in_flight = 100"):
        scheduler.enqueue(make_request(clock, 80, max_output_tokens=21))


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_limits_are_checked(value: object) -> None:
    with pytest.raises(RequestError, match="max_queue"):
        AdmissionLimits(max_queue=value)  # type: ignore[arg-type]


def test_impossible_and_duplicate_requests_are_refused() -> None:
    scheduler, clock = make_scheduler(num_pages=4), Clock()
    with pytest.raises(RequestError, match="KV cache of 32 tokens"):
        scheduler.enqueue(make_request(clock, 30, max_output_tokens=3))
    scheduler.enqueue(make_request(clock, 4, request_id="same"))
    with pytest.raises(RequestError, match="not in use"):
        scheduler.enqueue(make_request(clock, 4, request_id="same"))
    assert len(scheduler.waiting) == 1


@pytest.mark.parametrize("prompt", [1, 27, 28, 29, 31])
def test_a_request_alone_may_have_every_page(prompt: int) -> None:
    """Room for a pass beyond a request's end is not asked for, or one of this extent would wait for ever."""
    scheduler, clock = make_scheduler(num_pages=4), Clock()
    request = make_request(clock, prompt, max_output_tokens=32 - prompt)
    scheduler.enqueue(request)
    assert scheduler.admit(0.0) == [request]
    emit(request, 1)
    assert scheduler.reserve(request, 32 + 4)
    assert len(request.pages) == 4


def test_growth_preempts_the_last_in_the_order() -> None:
    scheduler, clock = make_scheduler(slots=3, num_pages=6, prefix_cache=False), Clock()
    first, second, third = (make_request(clock, 8, max_output_tokens=30) for _ in range(3))
    for request in (first, second, third):
        scheduler.enqueue(request)
    assert len(scheduler.admit(0.0)) == 2, "each has two pages; the third would leave none to grow"
    emit(first, 3)
    emit(second, 3)
    assert scheduler.reserve(first, 32)
    assert (len(first.pages), len(second.pages)) == (4, 2)
    assert scheduler.reserve(first, 38)
    assert len(first.pages) == 5
    assert second.slot is None
    assert second.incarnation == 1
    assert second.prefill_ids == second.sequence[:-1]
    # It is ahead of the third again, and what it had emitted is still its own.
    assert scheduler.waiting == [second, third]
    assert second.emitted == 3
    assert scheduler.snapshot()["preemptions"] == 1
    scheduler.retire(first, 0)
    assert scheduler.admit(0.0)[0] is second
    assert second.incarnation == 2


def test_a_request_that_is_last_preempts_itself() -> None:
    scheduler, clock = make_scheduler(slots=2, num_pages=5), Clock()
    first, second = (make_request(clock, 12, max_output_tokens=20) for _ in range(2))
    for request in (first, second):
        scheduler.enqueue(request)
    assert len(scheduler.admit(0.0)) == 2
    emit(first, 1)
    emit(second, 1)
    assert scheduler.reserve(first, 24)
    assert not scheduler.reserve(second, 17)
    assert (len(first.pages), second.slot, second.pages) == (3, None, [])
    assert scheduler.waiting == [second]


def test_a_page_is_never_reserved_beyond_the_extent() -> None:
    scheduler, clock = make_scheduler(), Clock()
    request = make_request(clock, 10, max_output_tokens=6)
    scheduler.enqueue(request)
    scheduler.admit(0.0)
    assert scheduler.reserve(request, 1000)
    assert len(request.pages) == 2


def test_growing_without_running_and_retiring_twice_are_errors() -> None:
    scheduler, clock = make_scheduler(), Clock()
    request = make_request(clock, 10)
    scheduler.enqueue(request)
    with pytest.raises(EngineError, match="does not run"):
        scheduler.reserve(request, 20)
    scheduler.retire(request, 0)
    with pytest.raises(EngineError, match="twice"):
        scheduler.retire(request, 0)


def test_deadlines_pass_while_waiting_and_while_running() -> None:
    scheduler, clock = make_scheduler(slots=1), Clock()
    requests = [make_request(clock, 4, deadline_s=deadline, at=0.0) for deadline in (5.0, 3.0, None)]
    for request in requests:
        scheduler.enqueue(request)
    scheduler.admit(0.0)
    assert scheduler.next_deadline() == 3.0
    assert scheduler.ended(2.9) == []
    (ending,) = scheduler.ended(3.0)
    assert (ending.request, ending.reason, ending.kind) == (requests[1], "error", "deadline")
    assert "3 s passed while the request was waiting" in (ending.error or "")
    scheduler.retire(requests[1], 0)
    (ending,) = scheduler.ended(5.0)
    assert ending.request is requests[0]
    assert "5 s passed while the request was running" in (ending.error or "")
    scheduler.retire(requests[0], 0)
    assert scheduler.next_deadline() is None
    assert scheduler.snapshot()["requests_expired"] == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 24), st.integers(1, 6), st.booleans())
def test_any_load_ends_and_gives_every_page_back(seed: int, num_pages: int, slots: int, prefix_cache: bool) -> None:
    """Random prompts with shared beginnings, random growth, cancellations and faults, on too few pages.

    A pass is: admit, prefill, let each running request emit. The order guarantees an end after finitely many passes.
    """
    draw, clock = random.Random(seed), Clock()
    scheduler = make_scheduler(slots=slots, num_pages=num_pages, prefix_cache=prefix_cache)
    total = num_pages * 8
    unfinished = []
    for _ in range(30):
        length = draw.randrange(1, max(2, total // 2))
        request = make_request(
            clock,
            length,
            family=draw.randrange(2),
            max_output_tokens=draw.randrange(1, total - length + 1),
            priority=draw.randrange(-2, 3),
        )
        scheduler.enqueue(request)
        unfinished.append(request)
    passes = 0
    while unfinished:
        passes += 1
        assert passes < 30 * (total + 2)
        scheduler.admit(0.0)
        running = scheduler.running
        assert running, "with nobody running, somebody can be admitted"
        occupied(scheduler, running)
        for request in sorted(running, key=lambda one: one.rank):
            if request.slot is None:
                continue
            if draw.random() < 0.05:
                scheduler.retire(request, 0 if draw.random() < 0.5 else request.committed_host)
                unfinished.remove(request)
                continue
            if not scheduler.reserve(request, len(request.sequence) + 3):
                continue
            emit(request, min(draw.randrange(1, 4), request.remaining_host))
            if not request.remaining_host:
                scheduler.retire(request, request.committed_host)
                unfinished.remove(request)
        occupied(scheduler, scheduler.running)
    pages = scheduler.page_counts()
    assert pages.used == 0
    assert pages.free + pages.cached == pages.total
    assert prefix_cache or pages.cached == 0


def test_the_joint_mode_is_that_of_the_group_now() -> None:
    joint, clock = JointMode(), Clock()
    plain, sampled, biased = (make_request(clock, 5) for _ in range(3))
    sampled.spec = replace(sampled.spec, mode=SamplingMode(sampled=True))
    biased.spec = replace(biased.spec, mode=SamplingMode(bias=True))
    for group in ([plain], [plain, sampled], [plain, sampled], [sampled, biased], [biased], [plain], []):
        mode = joint.of(group)
        assert (mode.sampled, mode.bias) == (sampled in group, biased in group)

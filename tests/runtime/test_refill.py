"""When waiting requests are let in: a short wait for company is allowed, and never a long one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dflash.runtime.refill import RefillPolicy

HOLD_S = 0.02


@pytest.mark.parametrize(
    ("running", "free_slots", "waits"),
    [(0, 1, False), (7, 1, False), (8, 1, True), (8, 2, False), (16, 2, True), (16, 3, False), (64, 3, True)],
)
def test_many_running_wait_for_company(running: int, free_slots: int, waits: bool) -> None:
    policy = RefillPolicy(slots=128, max_hold_s=HOLD_S)
    assert policy.is_open(1, running, free_slots, 5.0) is not waits
    assert policy.is_open(1, running, free_slots, 5.0 + 0.9 * HOLD_S) is not waits
    assert policy.is_open(1, running, free_slots, 5.0 + 1.1 * HOLD_S)


def test_each_wait_is_counted_from_its_own_start() -> None:
    policy = RefillPolicy(slots=16, max_hold_s=HOLD_S)
    assert not policy.is_open(1, 15, 1, 5.0)
    assert policy.is_open(1, 15, 1, 6.0)
    # The next one waits anew, and so does one that comes long after nobody waited any more.
    assert not policy.is_open(1, 15, 1, 6.001)
    assert not policy.is_open(0, 15, 1, 6.002)
    assert not policy.is_open(1, 15, 1, 7.0)


@given(st.lists(st.tuples(st.integers(0, 16), st.floats(1e-4, HOLD_S)), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_nobody_is_held_longer_than_that_beside_a_free_slot(turns: list[tuple[int, float]]) -> None:
    """Whatever the neighbours do: requests end or the slots stay full, and turns take any time up to the bound."""
    policy = RefillPolicy(slots=16, max_hold_s=HOLD_S)
    now, held = 0.0, 0.0
    for free_slots, seconds in turns:
        held = held if free_slots else 0.0
        if policy.is_open(1, 16 - free_slots, free_slots, now):
            held = 0.0
        else:
            assert held < HOLD_S
            assert free_slots < 4
            held += seconds
        now += seconds

"""Figures of a load against an engine in simulated time, whose rates are known."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine
from timed_endpoint import TimedEndpoint

from trtllm_dflash.bench.load import Load, run_load
from trtllm_dflash.bench.measurement import Measurement, measure
from trtllm_dflash.config.sampling import SamplingParams

PROMPTS = [f"prompt {number}" for number in range(300)]
PLAIN, DRAFTED = (1.0,), (10.0, 20.0, 30.0, 40.0, 30.0, 20.0, 10.0)
PREFILL_S, TOKENS = 0.017, 128


def _engine(users: int, histogram: tuple[float, ...], *, seed: int = 1) -> SimulatedEngine:
    """Prefills of 17 ms hold everybody up, eight in a row at most; cycles take 4 ms and 30 us a request."""
    return SimulatedEngine(
        users,
        prefill_s=PREFILL_S,
        cycle_s=lambda running: 0.004 + 0.00003 * running,
        histogram=histogram,
        prefills_per_turn=8,
        seed=seed,
    )


def _measured(
    users: int, histogram: tuple[float, ...], *, per_user: int = 2, warm_up: int | None = None
) -> Measurement:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    load = Load(users, None, max(16, per_user * users), warm_up)
    return measure(run_load(_engine(users, histogram), PROMPTS, params, load))


@pytest.mark.parametrize("users", [1, 4, 32, 128])
def test_rates_of_a_plain_engine_are_its_own(users: int) -> None:
    figures = _measured(users, PLAIN)
    request_s = _engine(users, PLAIN).request_s(TOKENS)
    assert figures.tok_s == pytest.approx(users * TOKENS / request_s, rel=0.01)
    assert figures.requests_s == pytest.approx(users / request_s, rel=0.01)
    assert figures.e2e_ms is not None
    assert figures.e2e_ms.mean == pytest.approx(request_s * 1e3, rel=0.01)
    assert figures.in_flight == pytest.approx(users, rel=1e-3)


@pytest.mark.parametrize(("users", "per_user"), [(1, 32), (8, 8), (64, 2)])
def test_rates_of_a_drafting_engine_are_its_own_within_chance(users: int, per_user: int) -> None:
    figures = _measured(users, DRAFTED, per_user=per_user)
    request_s = _engine(users, DRAFTED).request_s(TOKENS)
    assert figures.tok_s == pytest.approx(users * TOKENS / request_s, rel=0.02)
    # Requests of one length: every one of them brings all its tokens, whatever the window cut through.
    assert figures.tok_s / figures.requests_s == pytest.approx(TOKENS)


def test_a_wave_that_begins_together_would_be_far_off() -> None:
    """What the warm-up is for: without it, all prefills of a wave come first, and then nothing but decoding."""
    figures = _measured(128, PLAIN, per_user=1, warm_up=0)
    request_s = _engine(128, PLAIN).request_s(TOKENS)
    assert abs(figures.tok_s * request_s / (128 * TOKENS) - 1) > 0.1


def test_the_first_wave_is_over_before_anything_is_measured() -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    result = run_load(_engine(32, PLAIN), PROMPTS, params, Load(32, None, 64))
    first_wave_s = max(record.end for record in result.records if record.phase == "warm-up")
    assert first_wave_s <= result.window[0]
    settling = [record for record in result.records if record.phase == "settling"]
    # Half of a staggered wave is left when the mean warm-up has ended.
    assert 10 <= len(settling) <= 32
    assert len(result.measured) == 64


def test_arrivals_at_a_rate_are_counted_within_the_window() -> None:
    """An open loop need not be in balance: what left the engine counts."""
    load = Load(8, 300.0, 24)
    result = run_load(TimedEndpoint(events=4, gap_s=0.005), PROMPTS, SamplingParams(max_tokens=8), load)
    begin, end = result.window
    figures = measure(result)
    ended = sum(begin < record.end <= end for record in result.records)
    assert figures.requests_s == pytest.approx(ended / (end - begin))
    assert ended >= 24

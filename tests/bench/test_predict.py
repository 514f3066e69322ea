"""The prediction model against engines whose timing follows its formula exactly."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from sweep_documents import document, result, run

from trtllm_dflash.bench.predict import (
    held_out_errors,
    median_error,
    model_of,
    scaled,
    with_acceptance,
    with_cycle_table,
)
from trtllm_dflash.bench.predict_requests import predict_curve, read_cycle_table
from trtllm_dflash.errors import ConfigError

TOKENS, PREFILL_S = 65.0, 0.004
HISTOGRAM = (10, 20, 30, 40)
LENGTH = 1 + (20 + 2 * 30 + 3 * 40) / 100


def _figures(users: int, length: float, constant: float, slope: float, prefill_s: float = PREFILL_S) -> dict:
    cycles = (TOKENS - 1) / length
    request_s = cycles * (constant + slope * users) + users * prefill_s
    first_s = users * prefill_s
    histogram = HISTOGRAM if length > 1 else None
    return result(
        users * TOKENS / request_s, (TOKENS - 1) / (request_s - first_s), ttft_ms=first_s * 1e3, histogram=histogram
    )


def _measured(concurrencies: tuple[int, ...] = (1, 2, 4, 8)) -> dict:
    return document(
        [
            run(label, users, 0, _figures(users, length, constant, 0.0005))
            for label, length, constant in (("plain", 1.0, 0.010), ("fast", LENGTH, 0.014))
            for users in concurrencies
        ]
    )


def test_held_out_points_of_the_formula_are_met() -> None:
    errors = held_out_errors(_measured(), "fast")
    assert [error["concurrency"] for error in errors] == [2, 4]
    assert median_error(errors) == pytest.approx(0.0, abs=1e-9)


def test_a_kink_in_the_cycle_time_is_an_error_that_shows() -> None:
    results = _measured()
    for point in results["points"]:
        if point["concurrency"] == 4:
            point["tok_s"]["mean"] *= 0.8
            point["tok_s_gpu"]["mean"] *= 0.8
    error = median_error(held_out_errors(results, "fast"))
    assert error is not None
    assert error > 0.05


def test_too_few_points_have_no_error() -> None:
    assert median_error(held_out_errors(_measured((1, 2)), "fast")) is None


def test_another_acceptance_length_changes_the_number_of_cycles() -> None:
    predicted = with_acceptance(model_of(_measured(), "fast"), 4.0).predict(4)
    expected = _figures(4, 4.0, 0.014, 0.0005)
    assert predicted["tok_s"] == pytest.approx(expected["tok_s"])
    assert predicted["tok_s_user"] == pytest.approx(expected["tok_s_user"])


def test_twice_the_bandwidth_and_flops_is_twice_the_speed() -> None:
    model = model_of(_measured(), "fast")
    assert scaled(model, bandwidth=2, flops=2).predict(8)["tok_s"] == pytest.approx(2 * model.predict(8)["tok_s"])


def test_more_gpus_speed_up_a_user_and_not_a_gpu() -> None:
    model = model_of(_measured(), "fast")
    two = scaled(model, tp=2, layer_comm_s=15e-6)
    assert model.predict(1)["tok_s_user"] < two.predict(1)["tok_s_user"] < 2 * model.predict(1)["tok_s_user"]
    assert two.predict(1)["tok_s_gpu"] < model.predict(1)["tok_s_gpu"]


def test_beyond_the_batch_limit_throughput_stays() -> None:
    results = document(
        [run("fast", users, 0, _figures(users, LENGTH, 0.014, 0.0005), max_batch_size=4) for users in (1, 2, 4)]
    )
    model = model_of(results, "fast")
    assert model.predict(64)["tok_s"] == model.predict(4)["tok_s"]


def test_a_shorter_block_cuts_the_histogram() -> None:
    model = with_cycle_table(model_of(_measured(), "fast"), {2: {1: 0.01, 8: 0.02}, 1: {1: 0.008}}, 2)
    # 90 of 100 cycles keep at least one draft.
    assert model.acceptance_length == pytest.approx(1.9)
    assert model.cycle_s.at(1) == 0.01
    assert with_cycle_table(model, {1: {1: 0.008}}, 1).acceptance_length == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("al=3.5", "acceptance length 3.5"),
        ("bandwidth-x=1.67", "1.67x bandwidth, 1.67x FLOP/s"),
        ("tp=2,comm-us=10", "tensor parallel 2 (10 us of communication a layer)"),
        ("S=1,from=fast", "block size 1"),
    ],
)
def test_a_curve_says_what_it_assumes_and_its_error(words: str, said: str) -> None:
    curve = predict_curve(_measured(), words, concurrencies=(1, 16))
    assert said in curve["label"]
    assert "median error on held-out measured points 0.0%" in curve["assumptions"]
    assert [point["concurrency"] for point in curve["points"]] == [1, 16]


def test_gpus_by_name() -> None:
    results = _measured()
    results["machine"] = {**results["machine"], "gpus": ["NVIDIA H200"]}
    curve = predict_curve(results, "gpu=B200", concurrencies=(1,))
    assert "on B200 (1.67x bandwidth, 2.28x FLOP/s of H200)" in curve["label"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("al=9", "expected 1 to the block size 4"),
        ("speed=2", "unknown speed"),
        ("al", "expected key=value"),
        ("al=x", "expected a number"),
        ("gpu=B200", "both must be known"),
        ("from=nobody,al=2", "no configuration 'nobody'"),
        ("S=3", "no block size 3"),
    ],
)
def test_what_cannot_be_predicted_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        predict_curve(_measured(), words, concurrencies=(1,))
    assert message in caught.value.message


def test_a_cycle_table_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "cycles.json"
    file.write_text(json.dumps({"cycle_s": {"4": {"1": 0.01, "8": 0.02}}}))
    table = read_cycle_table(file)
    assert table == {4: {1: 0.01, 8: 0.02}}
    assert predict_curve(_measured(), "from=fast", concurrencies=(1,), table=table)["points"][0]["tok_s"] > 0
    for bad in ("[]", "{}", '{"cycle_s": {"4": {}}}', '{"cycle_s": {"4": {"1": 0}}}'):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="cycle table"):
            read_cycle_table(file)


def _simulated(
    users: int, *, prefill_s: float = PREFILL_S, shares_a_pass: bool = False, requests: int = 200, seed: int = 7
) -> dict:
    """A continuous-batching engine: each turn prefills who is new, then runs one cycle for all.

    Prefills come one after the other, or in one pass that takes as long as one of them.
    """
    draw = random.Random(seed)
    clock = 0.0
    left = [TOKENS - 1] * users
    sent, first, last = [0.0] * users, [0.0] * users, [0.0] * users
    finished: list[tuple[float, float]] = []
    waiting: set[int] = set()
    counting_from, tokens = None, 0.0
    # Users begin out of step, and what the first of them got through is not counted.
    for user in range(users):
        left[user] = float(draw.randint(1, int(TOKENS) - 1))
    while len(finished) < users + max(requests, 6 * users):
        for number, user in enumerate(sorted(waiting)):
            clock += prefill_s if number == 0 or not shares_a_pass else 0.0
            first[user], left[user], tokens = clock, TOKENS - 1, tokens + 1
        if shares_a_pass:
            for user in waiting:
                first[user] = clock
        waiting.clear()
        clock += 0.002 + 0.00005 * users if shares_a_pass else 0.014 + 0.0005 * users + 0.00002 * users**1.5
        for user in range(users):
            committed = min(left[user], float(1 + draw.choices(range(4), HISTOGRAM)[0]))
            left[user], tokens, last[user] = left[user] - committed, tokens + committed, clock
            if left[user] == 0:
                finished.append((first[user] - sent[user], last[user] - first[user]))
                sent[user] = clock
                waiting.add(user)
        if counting_from is None and len(finished) >= users:
            counting_from, tokens = clock, 0.0
    assert counting_from is not None
    counted = finished[2 * users :]
    ttft_s = sum(ttft for ttft, _ in counted) / len(counted)
    rate = len(counted) * (TOKENS - 1) / sum(decode for _, decode in counted)
    return result(tokens / (clock - counting_from), rate, ttft_ms=ttft_s * 1e3, histogram=HISTOGRAM)


def test_the_formula_holds_for_continuous_batching() -> None:
    """It knows nothing of who waits for whom within a turn; 5 % is half of what is asked of it on an engine."""
    results = document([run("fast", users, 0, _simulated(users)) for users in (1, 2, 4, 8, 16, 32)])
    assert model_of(results, "fast").pass_share == 0.0
    error = median_error(held_out_errors(results, "fast"))
    assert error is not None
    assert error < 0.05


def test_prefills_that_share_a_pass_are_seen_in_the_measured_points() -> None:
    """A small model on a fast GPU: a prefill takes as long as eight cycles, for one prompt as for many."""
    figures = {users: _simulated(users, prefill_s=0.017, shares_a_pass=True) for users in (1, 2, 4, 8, 16, 32, 64, 128)}
    results = document([run("fast", users, 0, one) for users, one in figures.items()])
    model = model_of(results, "fast")
    # As if prefills came one by one, 128 of them would take longer than the requests took.
    assert 128 * model.prefill_s > 128 * TOKENS / figures[128]["tok_s"]
    assert model.pass_share > 0.5
    said = predict_curve(results, "al=2", concurrencies=(1,))["assumptions"]
    assert f"{model.pass_share:.0%} of a prefill is its pass" in said
    error = median_error(held_out_errors(results, "fast"))
    assert error is not None
    assert error < 0.05


def test_the_share_of_a_pass_matters_for_another_acceptance_length() -> None:
    """Twice as many cycles: prefills share fewer passes, and the engine's own simulation says how many."""
    points = (1, 2, 4, 8, 16, 32, 64, 128)
    results = document(
        [run("fast", users, 0, _simulated(users, prefill_s=0.017, shares_a_pass=True)) for users in points]
    )
    cycles = (TOKENS - 1) / 1.5
    predicted = with_acceptance(model_of(results, "fast"), 1.5).predict(64)
    passes = cycles * (1 - math.exp(-64 / cycles))
    expected = 64 * TOKENS / (cycles * (0.002 + 0.00005 * 64) + 0.017 * passes)
    assert predicted["tok_s"] == pytest.approx(expected, rel=0.15)

"""Points, intervals, frontier, best point and comparison, from runs with known figures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sweep_documents import document, result, run

from trtllm_dflash.bench.compare import compare_sweeps
from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.bench.machine import Steadiness, noise_warnings
from trtllm_dflash.bench.sweep_results import confidence_half_width
from trtllm_dflash.bench.targets import Target, best_point, deployment_of, read_deployment, write_deployment
from trtllm_dflash.errors import ConfigError


def _grid() -> list:
    places = {("plain", 1): (40, 50), ("plain", 2): (70, 40), ("fast", 1): (90, 100), ("fast", 2): (100, 60)}
    return [
        run(label, users, repeat, result(y + repeat, x + repeat, ttft_ms=20.0 * users, histogram=None))
        for (label, users), (y, x) in places.items()
        for repeat in range(2)
    ]


def test_the_frontier_is_what_nothing_beats() -> None:
    assert document(_grid())["frontier"] == [
        {"config": "fast", "concurrency": 1},
        {"config": "fast", "concurrency": 2},
    ]


def test_confidence_interval_is_students() -> None:
    # Student's table: t(0.975, 2 degrees of freedom) = 4.302653; 1, 2, 4 have the variance 7 / 3.
    assert confidence_half_width([1.0, 2.0, 4.0]) == pytest.approx(4.302653 * (7 / 3 / 3) ** 0.5, rel=1e-6)
    assert confidence_half_width([1.0]) is None
    # An interval of two values is 12.7 standard errors wide: it would only hide the points.
    assert confidence_half_width([1.0, 2.0]) is None


def test_acceptance_is_pooled_over_runs() -> None:
    runs = [
        run("fast", 1, 0, result(10, 10, histogram=[8, 0, 0, 2])),
        run("fast", 1, 1, result(10, 10, histogram=[0, 0, 0, 10])),
    ]
    (point,) = document(runs)["points"]
    assert point["acceptance"]["acceptance_length"] == 1 + (2 * 3 + 30) / 20
    assert point["acceptance"]["histogram"] == [8, 0, 0, 12]
    assert point["acceptance"]["per_position"] == [0.6, 0.6, 0.6]


def test_different_greedy_outputs_are_said() -> None:
    runs = _grid()
    assert not any("identical" in text for text in document(runs)["warnings"])
    runs[0].result["outputs_sha256"] = "another"
    assert any("not all identical at concurrency 1:" in text for text in document(runs)["warnings"])


def test_a_noisy_machine_is_told_so() -> None:
    quiet = [Steadiness(10.0 + 0.1 * (n % 3), 0.1) for n in range(20)]
    noisy = [Steadiness(10.0 if n % 4 else 15.0, 3.0) for n in range(20)]
    assert noise_warnings(quiet, [("a", 0.02)]) == []
    assert any("noisy" in text for text in noise_warnings(noisy, []))
    assert any("worst: b, ±40%" in text for text in noise_warnings(quiet, [("a", 0.01), ("b", 0.4)]))


@pytest.mark.parametrize(
    ("target", "best"),
    [
        (Target(tok_s_user=50), ("fast", 2)),
        (Target(tok_s_user=80), ("fast", 1)),
        (Target(ttft_p95_ms=20), ("fast", 1)),
        (Target(itl_p95_ms=1000), ("fast", 2)),
    ],
)
def test_the_best_point_has_the_most_throughput_within_the_target(target: Target, best: tuple[str, int]) -> None:
    found = best_point(document(_grid()), target)
    assert (found["config"], found["concurrency"]) == best


def test_an_unreachable_target_says_what_was_best() -> None:
    found = best_point(document(_grid()), Target(tok_s_user=500))
    assert not found["found"]
    assert "the most tok/s per user was 100.5" in found["why"]
    with pytest.raises(ConfigError, match="no measured point"):
        deployment_of(document(_grid()), found, [])


def test_deployment_settings_are_the_best_points(tmp_path: Path) -> None:
    results = document(_grid())
    configurations = [
        Configuration("plain", engines=Path("e"), speculation="off"),
        Configuration("fast", engines=Path("e"), block_size=4),
    ]
    best = best_point(results, Target(tok_s_user=50))
    written = deployment_of(results, best, configurations)
    write_deployment(written, tmp_path)
    read = read_deployment(tmp_path)
    assert read == written
    assert read["engines"] == str(Path("e").resolve()), "deploy may be run from another directory"
    assert (read["max_concurrency"], read["block_size"], read["speculation"]) == (2, 4, "auto")


def test_no_deployment_settings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no deployment settings"):
        read_deployment(tmp_path)


def _noisy(shift: float, seed: int) -> dict:
    draw = random.Random(seed)
    runs = [
        run(label, users, repeat, result(100 * factor * draw.gauss(1, 0.01), 50 * draw.gauss(1, 0.01)))
        for label, users in (("plain", 1), ("plain", 2), ("fast", 1), ("fast", 2))
        for repeat in range(5)
        for factor in [shift if (label, users) == ("fast", 2) else 1.0]
    ]
    return document(runs)


def test_only_what_moved_beyond_noise_is_named() -> None:
    changes = compare_sweeps(_noisy(1.0, seed=1), _noisy(0.8, seed=2))
    moved = [(c.config, c.concurrency, c.metric, c.verdict) for c in changes if c.verdict != "same"]
    assert moved == [("fast", 2, "tok/s per GPU", "worse")]


def test_noise_alone_rarely_counts_as_a_change() -> None:
    false_alarms = sum(
        any(c.verdict in ("better", "worse") for c in compare_sweeps(_noisy(1.0, 100 + n), _noisy(1.0, 200 + n)))
        for n in range(30)
    )
    # Holm keeps a false alarm anywhere below 5 %: of 30, 5 or more have a chance below 2 %.
    assert false_alarms < 5


def test_without_repeats_nothing_is_claimed() -> None:
    once = document([run("plain", 1, 0, result(100, 50))])
    half = document([run("plain", 1, 0, result(50, 25))])
    assert {c.verdict for c in compare_sweeps(once, half)} == {"unknown"}


def test_sweeps_of_other_prompts_are_not_compared() -> None:
    one, other = document(_grid()), document(_grid())
    other["method"] = {**other["method"], "workload": {**other["method"]["workload"], "prompts_sha256": "00"}}
    with pytest.raises(ConfigError, match="differ in prompts_sha256"):
        compare_sweeps(one, other)


def test_sweeps_of_another_method_are_not_compared() -> None:
    """A results.json from before methods had versions is of the first."""
    one, other = document(_grid()), document(_grid())
    one["method"] = {**one["method"], "version": 2}
    with pytest.raises(ConfigError, match="measured by methods 2 and 1"):
        compare_sweeps(one, other)


def test_two_runs_far_apart_are_noise_without_an_interval() -> None:
    runs = [run("plain", 1, repeat, result(rate, 50)) for repeat, rate in enumerate((100, 140))]
    results = document(runs)
    assert results["points"][0]["tok_s"]["ci95"] is None
    assert any("uncertain by more than 10%" in text and "±17%" in text for text in results["warnings"])

"""What the engine process counts."""

from __future__ import annotations

import time

from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk, RequestMetrics
from trtllm_dflash.serving.engine_metrics import AcceptanceWatch, EngineMetrics, Histogram
from trtllm_dflash.serving.metric_definitions import kind_of_sample, metric_of

STATS = EngineStats(10, 7, 2, 1, 1, 3, {"cycles": 5, "preemptions": 4})


def metrics_of(histogram: tuple[int, ...], *, completion: int) -> RequestMetrics:
    cycles = sum(histogram)
    accepted = sum(kept * count for kept, count in enumerate(histogram))
    length = (accepted + cycles) / cycles if cycles else None
    return RequestMetrics(4, completion, cycles, 7 * cycles, accepted, histogram, length, 0.02, 0.3, 1.5)


def values(metrics: EngineMetrics) -> dict[str, float]:
    return {name + "".join(labels.values()): value for name, labels, value in metrics.samples(STATS)}


def test_histogram_is_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.05, 2), (0.1, 1), (0.5, 1), (7.0, 3)):
        histogram.observe(value, times)
    assert histogram.samples("x") == [
        ("x_bucket", {"le": "0.1"}, 3),
        ("x_bucket", {"le": "1.0"}, 4),
        ("x_bucket", {"le": "+Inf"}, 7),
        ("x_sum", {}, 0.05 * 2 + 0.1 + 0.5 + 21.0),
        ("x_count", {}, 7),
    ]


def test_a_request_is_counted_by_outcome_tokens_and_positions() -> None:
    metrics = EngineMetrics({"backend": "torch"}, speculates=True)
    metrics.delivered(OutputChunk("a", "x", (1,)))
    time.sleep(0.011)
    metrics.delivered(OutputChunk("a", "yz", (2, 3)))
    metrics.delivered(OutputChunk("a", "", (), finish_reason="stop", metrics=metrics_of((1, 0, 2), completion=3)))
    found = values(metrics)
    assert found["dflash_requests_totalstop"] == 1
    assert found["dflash_output_tokens_total"] == 3
    assert found["dflash_prompt_tokens_total"] == 4
    assert (found["dflash_cycles_total"], found["dflash_drafted_tokens_total"]) == (3, 21)
    # Two cycles kept two drafts: positions 1 and 2, twice each.
    assert found["dflash_accepted_tokens_per_position_total1"] == 2
    assert found["dflash_accepted_tokens_per_position_total2"] == 2
    assert found["dflash_inter_token_seconds_count"] == 2
    assert found["dflash_inter_token_seconds_bucket0.005"] == 0  # two tokens 11 ms later: 5.5 ms each
    assert found["dflash_inter_token_seconds_sum"] >= 0.011
    assert found["dflash_time_to_first_token_seconds_bucket0.25"] == 0
    assert found["dflash_time_to_first_token_seconds_bucket0.5"] == 1
    assert found["dflash_engine_infotorch"] == 1


def test_engine_statistics_and_unknown_counters_are_passed_on() -> None:
    found = values(EngineMetrics({}, speculates=False))
    assert [found[f"dflash_kv_pages{state}"] for state in ("free", "used", "cached")] == [7, 2, 1]
    assert (found["dflash_requests_running"], found["dflash_requests_waiting"]) == (1, 3)
    assert found["dflash_preemptions_total"] == 4
    assert "dflash_acceptance_length" not in found


def test_refusals_and_failures_have_codes() -> None:
    metrics = EngineMetrics({}, speculates=True)
    metrics.refused("INVALID_ARGUMENT")
    metrics.failed("x", "INTERNAL")
    found = values(metrics)
    assert (found["dflash_requests_totalrefused"], found["dflash_requests_totalerror"]) == (1, 1)
    assert (found["dflash_errors_totalINVALID_ARGUMENT"], found["dflash_errors_totalINTERNAL"]) == (1, 1)


def test_the_work_of_a_failed_request_counts() -> None:
    metrics = EngineMetrics({}, speculates=True)
    metrics.delivered(OutputChunk("a", "x", (1, 2)))
    end = OutputChunk("a", "z", (3,), finish_reason="error", metrics=metrics_of((1, 0, 2), completion=3))
    metrics.failed("a", "DEADLINE_EXCEEDED", end)
    found = values(metrics)
    assert (found["dflash_output_tokens_total"], found["dflash_prompt_tokens_total"]) == (3, 4)
    assert (found["dflash_cycles_total"], found["dflash_drafted_tokens_total"]) == (3, 21)
    assert found["dflash_accepted_tokens_total"] == 4
    assert found["dflash_accepted_tokens_per_position_total2"] == 2
    assert found["dflash_request_seconds_count"] == 0  # not a service time


def test_every_sample_has_a_definition() -> None:
    metrics = EngineMetrics({}, speculates=True)
    metrics.delivered(OutputChunk("a", "x", (1,), finish_reason="stop", metrics=metrics_of((0, 1), completion=1)))
    metrics.refused("INTERNAL")
    for name, _, _ in metrics.samples(STATS):
        assert metric_of(name) is not None, name
    assert kind_of_sample("dflash_kv_pages") == "gauge"
    assert kind_of_sample("dflash_queue_seconds_bucket") == kind_of_sample("unheard_of") == "counter"


def test_low_acceptance_is_warned_of_once() -> None:
    warnings: list[str] = []
    watch = AcceptanceWatch(window_cycles=100, warn=warnings.append)
    for _ in range(9):
        watch.add(10, 1.1)
    assert not warnings  # not enough cycles to judge
    for _ in range(30):
        watch.add(10, 1.1)
    assert len(warnings) == 1
    assert "acceptance length is 1.10 over the last 100 cycles" in warnings[0]
    assert watch.low
    for _ in range(10):
        watch.add(10, 3.0)
    assert not watch.low
    assert watch.acceptance_length == 3.0
    for _ in range(10):
        watch.add(10, 1.0)
    assert len(warnings) == 2


def test_a_request_without_cycles_changes_nothing() -> None:
    watch = AcceptanceWatch(window_cycles=1)
    watch.add(0, None)
    assert (watch.acceptance_length, watch.low) == (0.0, False)

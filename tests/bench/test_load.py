"""The load around the measured requests, and the figures made of it."""

from __future__ import annotations

import itertools

import pytest
from timed_endpoint import TimedEndpoint

from trtllm_dflash.bench import load
from trtllm_dflash.bench.load import Load, LoadResult, run_load
from trtllm_dflash.bench.measurement import kept_shares, measure, percentiles
from trtllm_dflash.bench.records import RequestRecord
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import ConfigError, EngineError

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = [f"prompt {number}" for number in range(12)]


def test_closed_loop_keeps_its_concurrency_and_measures_the_first_prompts_in_order() -> None:
    endpoint = TimedEndpoint()
    result = run_load(endpoint, PROMPTS, GREEDY, Load(3, None, 9))
    assert endpoint.most_at_once == 3
    assert sorted(record.index for record in result.measured) == list(range(9))
    assert sum(record.phase == "warm-up" for record in result.records) == 3


def test_load_is_kept_up_until_the_last_measured_request_has_ended() -> None:
    result = run_load(TimedEndpoint(), PROMPTS, GREEDY, Load(4, None, 8))
    assert any(record.phase == "cool-down" for record in result.records)
    # 4 users without a pause: the share of time that a user waits for its next request is scheduling alone.
    assert measure(result).in_flight > 3.5


@pytest.mark.parametrize("users", [0, 10_001, 10**30])
def test_users_beyond_what_threads_there_can_be_are_refused(users: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 10000"):
        Load(users, None, 4)


def test_warm_up_lengths_differ_so_that_users_fall_out_of_step() -> None:
    endpoint = TimedEndpoint()
    run_load(endpoint, PROMPTS, GREEDY, Load(4, None, 4))
    assert sorted(params.max_tokens or 0 for _, params in endpoint.seen[:4]) == [2, 4, 6, 8]


def test_a_seed_is_offset_per_request_and_the_same_for_every_run() -> None:
    seeds = []
    for _ in range(2):
        endpoint = TimedEndpoint()
        run_load(endpoint, PROMPTS, SamplingParams(max_tokens=8, seed=5), Load(2, None, 6, warm_up=0))
        seeds.append({prompt: params.seed for prompt, params in endpoint.seen if prompt in PROMPTS[:6]})
    assert [seeds[0][prompt] for prompt in PROMPTS[:6]] == [5, 6, 7, 8, 9, 10]
    assert seeds[0] == seeds[1]


def test_arrivals_follow_the_rate_and_the_cap() -> None:
    endpoint = TimedEndpoint(events=2, gap_s=0.02)
    result = run_load(endpoint, PROMPTS, GREEDY, Load(2, 200.0, 12))
    assert len(result.measured) == 12
    assert endpoint.most_at_once <= 2


def test_rates_are_tokens_of_the_window_and_of_one_user() -> None:
    result = run_load(TimedEndpoint(events=5, gap_s=0.01, tokens_per_event=3), PROMPTS, GREEDY, Load(2, None, 10))
    figures = measure(result, gpus=2, joules=7.0)
    assert figures.tok_s_gpu == figures.tok_s / 2
    # Sleeps only ever take longer: a user sees at most 3 tokens in 10 ms, two users at most twice that.
    assert figures.tok_s_user is not None
    assert 0 < figures.tok_s_user <= 300
    assert figures.tok_s <= 2 * 300 * 5 / 4
    assert figures.itl_ms is not None
    assert figures.itl_ms.count == 10 * 4
    assert figures.joules_per_token == pytest.approx(7.0 / (figures.tok_s * figures.window_s))
    assert figures.acceptance is not None
    assert figures.acceptance.acceptance_length == 3.0
    assert figures.acceptance.per_position == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_failed_requests_are_counted_and_left_out() -> None:
    figures = measure(run_load(TimedEndpoint(fail=PROMPTS[:1]), PROMPTS, GREEDY, Load(2, None, 4)))
    assert (figures.requests, figures.errors) == (4, 1)
    assert figures.first_error == "prompt 0 is refused"
    assert figures.itl_ms is not None
    assert figures.itl_ms.count == 3 * 3


def test_a_user_whose_requests_fail_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(load, "LONGEST_PAUSE_S", 0.15)
    failing = [PROMPTS[number] for number in (0, 1, 2, 3, 5)]
    endpoint = TimedEndpoint(events=0, fail=failing)
    result = run_load(endpoint, PROMPTS, GREEDY, Load(1, None, 7, warm_up=0))
    starts = [record.start for record in result.records]
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.15, 0.15, 0.0, 0.05), strict=True))
    # An answer makes the next pause short again.
    assert pauses[5] < 0.14


def test_nothing_but_failures_is_an_error() -> None:
    result = run_load(TimedEndpoint(fail=PROMPTS), PROMPTS, GREEDY, Load(1, None, 2))
    with pytest.raises(EngineError, match="all 2 measured requests failed, the first with: prompt 0"):
        measure(result)


def test_a_fault_of_the_client_ends_the_load() -> None:
    class Broken(TimedEndpoint):
        def run(self, prompt, params, record, stop):  # type: ignore[no-untyped-def]
            raise OSError("no more sockets")

    with pytest.raises(OSError, match="no more sockets"):
        run_load(Broken(), PROMPTS, GREEDY, Load(2, None, 4))


def test_pooled_and_per_request_acceptance_differ() -> None:
    def record(cycles: int, accepted: int, histogram: tuple[int, ...]) -> RequestRecord:
        return RequestRecord(
            0,
            "measured",
            0.0,
            1.0,
            [(0.5, 1), (1.0, 1)],
            "stop",
            cycles=cycles,
            accepted=accepted,
            drafted=3 * cycles,
            histogram=histogram,
        )

    figures = measure(LoadResult((record(1, 3, (0, 0, 0, 1)), record(9, 0, (9, 0, 0, 0))), (0.0, 1.0)))
    assert figures.acceptance is not None
    assert figures.acceptance.acceptance_length == 13 / 10
    assert figures.acceptance.acceptance_length_per_request == (4.0 + 1.0) / 2
    assert figures.acceptance.histogram == (9, 0, 0, 1)


def test_plain_decoding_has_no_acceptance() -> None:
    record = RequestRecord(
        0, "measured", 0.0, 1.0, [(0.5, 1), (1.0, 1)], "stop", cycles=1, accepted=0, drafted=0, histogram=(1,)
    )
    assert measure(LoadResult((record,), (0.0, 1.0))).acceptance is None


def test_percentiles_are_numpys() -> None:
    import numpy

    values = numpy.random.default_rng(3).exponential(size=37)
    found = percentiles(values.tolist())
    assert found is not None
    assert [found.p50, found.p95, found.p99] == pytest.approx(numpy.percentile(values, [50, 95, 99]).tolist())


def test_kept_shares_are_the_tail_of_the_histogram() -> None:
    assert kept_shares((5, 3, 2)) == (0.5, 0.2)


@pytest.mark.parametrize("arguments", [(None, None, 1), (0, None, 1), (1, 0.0, 1), (1, None, 0), (1, None, 1, -1)])
def test_impossible_loads_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError):
        Load(*arguments)  # type: ignore[arg-type]

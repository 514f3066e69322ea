"""Adaptive block size: the table, the estimate and the choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.block_policy import BlockSizePolicy, CycleTable
from trtllm_dflash.runtime.cycle_runner import CycleRunner, EngineOptions, batch_choices, block_size_choices
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.refill import RefillPolicy

SIZES = (1, 2, 4, 8)
# At batch 1 a cycle costs the same whatever its block; at batch 64 every row costs.
TABLE = CycleTable({(batch, size): 1.0 + 0.25 * batch * size / 64 * 16 for batch in (1, 64) for size in SIZES})


def _teach(policy: BlockSizePolicy, probability: float, cycles: int = 400, size: int = 8) -> None:
    draw = random.Random(0)
    for _ in range(cycles):
        accepted = 0
        while accepted < size - 1 and draw.random() < probability:
            accepted += 1
        policy.observe(size, [accepted])


def test_times_between_measured_batches_are_linear() -> None:
    table = CycleTable({(1, 4): 1.0, (5, 4): 3.0})
    assert [table.at(batch, 4) for batch in (1, 2, 3, 5, 9)] == [1.0, 1.5, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_estimate_learns_the_acceptance(probability: float) -> None:
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, probability, cycles=3000)
    expected = sum(probability**kept for kept in range(8))
    # Standard error of the mean of 3,000 cycles, five times.
    assert policy.expected_tokens()[7] == pytest.approx(expected, abs=5 * 2.5 / 3000**0.5)
    assert policy.expected_tokens()[0] == 1.0


def test_speculation_that_does_not_pay_is_left_off() -> None:
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, 0.05)
    choices = [policy.choose(64, 8) for _ in range(127)]
    assert set(choices) == {1}
    assert policy.choose(64, 8) == 2, "every 128th cycle tries the next size"


def test_a_busy_host_makes_rows_free() -> None:
    """Where every cycle waits for the host anyway, a larger block is free; later the device's time counts again."""
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, 0.4)
    alone = policy.choose(64, 8)
    assert alone < 8
    for _ in range(200):
        policy.observe_host(64, 1000.0)
    assert policy.choose(64, 8) == 8
    for _ in range(400):
        policy.observe_host(64, 1e-3)
    assert policy.choose(64, 8) == alone


def test_the_host_is_as_busy_as_the_batch_is_large() -> None:
    """A load that ends leaves a few requests for many cycles; with the next one the host is busy at once."""
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, 0.4)
    for _ in range(20):
        policy.observe_host(64, 1000.0)
    for _ in range(1000):
        policy.observe_host(2, 1e-3)
    assert policy.choose(64, 8) == 8
    assert policy.choose(127, 8) == 8, "the same power of two"


@pytest.mark.parametrize(("advantage", "chosen"), [(1.02, 8), (1.05, 4)])
def test_a_smaller_block_must_be_clearly_better(advantage: float, chosen: int) -> None:
    """Times of a few cycles are no more exact than that, and with the whole block nothing is lost against always."""
    known = BlockSizePolicy(TABLE, 8)
    _teach(known, 0.7)
    expected = known.expected_tokens()
    seconds = {1: 1.0, 2: 1.0, 4: 1.0, 8: advantage * expected[7] / expected[3]}
    policy = BlockSizePolicy(CycleTable({(1, size): seconds[size] for size in SIZES}), 8)
    _teach(policy, 0.7)
    assert policy.choose(1, 8) == chosen


def test_plain_decoding_need_not_be_clearly_better() -> None:
    known = BlockSizePolicy(TABLE, 8)
    _teach(known, 0.7)
    expected = known.expected_tokens()
    seconds = {size: 1.01 * expected[size - 1] for size in SIZES} | {1: 1.0}
    policy = BlockSizePolicy(CycleTable({(1, size): seconds[size] for size in SIZES}), 8)
    _teach(policy, 0.7)
    assert policy.choose(1, 8) == 1


def test_the_whole_block_where_rows_are_free() -> None:
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, 0.9)
    assert policy.choose(1, 8) == 8


def test_a_block_is_never_longer_than_useful_or_allowed() -> None:
    policy = BlockSizePolicy(TABLE, 4)
    _teach(policy, 0.95, size=4)
    assert policy.choose(1, 8) == 4
    assert policy.choose(1, 3) == 2
    assert policy.choose(1, 1) == 1


def test_it_comes_back_when_acceptance_does() -> None:
    policy = BlockSizePolicy(TABLE, 8)
    _teach(policy, 0.02)
    assert policy.choose(64, 8) == 1
    _teach(policy, 0.98, cycles=20_000)
    assert policy.choose(64, 8) > 1


def test_choices_hold_their_ends() -> None:
    assert batch_choices(1) == (1,)
    assert batch_choices(48) == (1, 2, 4, 8, 16, 32, 48)
    assert block_size_choices(1) == (1,)
    assert block_size_choices(16)[-1] == 16
    assert block_size_choices(5) == (1, 2, 3, 4, 5)


def test_an_adaptive_engine_gives_the_same_greedy_text(tiny_engines: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompts = [[20, 21, 22], [30] * 40]
    engines = tiny_engines("llama-v2", max_batch_size=4)
    with LLM(engines, device="cpu", speculation="off") as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(engines, device="cpu", options=EngineOptions(adaptive=True)) as llm:
        table = llm.cycle_table
        assert table is not None
        assert table.block_sizes == block_size_choices(llm.block_size)
        assert all(seconds > 0 for seconds in table.seconds.values())
        assert [output.token_ids for output in llm.generate(prompts, params)] == plain
        assert llm.stats().pages_used == 0


def test_measured_cycles_stay_in_the_page_table(
    tiny_engines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every measured cycle moves its slots on, by a whole block where all drafts are kept."""
    furthest: list[int] = []
    launch = CycleRunner.launch

    def watched(self: CycleRunner, slots: Sequence[int], block_size: int, *rest: Any) -> Any:
        furthest.append(max(int(self._state._ints[1, slot]) for slot in slots) + block_size)
        return launch(self, slots, block_size, *rest)

    monkeypatch.setattr(CycleRunner, "launch", watched)
    options = EngineOptions(adaptive=True, forced_acceptance=6.0)
    with LLM(tiny_engines("llama-v2", max_batch_size=4, max_seq_len=32), device="cpu", options=options) as llm:
        assert llm.block_size == 6
        assert llm.cycle_table is not None
    assert len(furthest) > 100
    assert max(furthest) <= 32


def test_the_host_is_timed_where_a_turn_is_a_cycle(
    tiny_engines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns with a prefill are not the price of a cycle, and without overlap host and device take turns."""
    seen: list[float] = []
    monkeypatch.setattr(BlockSizePolicy, "observe_host", lambda self, batch, seconds: seen.append(seconds / batch))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engines = tiny_engines("llama-v2", max_batch_size=4)
    with LLM(engines, device="cpu", options=EngineOptions(adaptive=True, overlap=True)) as llm:
        cycles = llm.generate([[20, 21, 22]], params)[0].metrics.cycles
    # The first cycle is launched in the turn of the prefill.
    assert 1 <= len(seen) <= cycles + 1
    assert all(seconds > 0 for seconds in seen)
    seen.clear()
    with LLM(engines, device="cpu", options=EngineOptions(adaptive=True, overlap=False)) as llm:
        llm.generate([[20, 21, 22]], params)
    assert seen == []


def test_seeded_samples_do_not_depend_on_the_clock(tiny_engines: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50)
    engines = tiny_engines("llama-v2", max_batch_size=4)
    texts = []
    for adaptive in (False, True):
        with LLM(engines, device="cpu", options=EngineOptions(adaptive=adaptive)) as llm:
            texts.append(llm.generate([[20, 21, 22]], params)[0].token_ids)
    assert texts[0] == texts[1]


def test_forced_acceptance_is_what_was_asked_for(tiny_engines: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    with LLM(tiny_engines("llama-v2"), device="cpu", options=EngineOptions(forced_acceptance=2.35)) as llm:
        metrics = [output.metrics for output in llm.generate([[20, 21, 22]] * 16, params)]
    pooled = sum(one.completion_tokens - 1 for one in metrics) / sum(one.cycles for one in metrics)
    # About 1,200 cycles of 2 or 3 tokens: five standard errors.
    assert pooled == pytest.approx(2.35, abs=5 * 0.48 / 1200**0.5)


def test_stages_of_a_cycle_are_measured(tiny_engines: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        before = llm.generate([[20, 21, 22]], params)[0].token_ids
        stages = llm.profiler.stages(2, 4, context=40, repeats=2)
        assert list(stages) == ["prepare", "draft_and_select", "verify", "accept", "inject", "publish"]
        assert all(seconds > 0 for seconds in stages.values())
        assert llm.generate([[20, 21, 22]], params)[0].token_ids == before


def test_refill_waits_for_a_few_slots_and_not_for_long() -> None:
    policy = RefillPolicy(64, max_hold_s=0.5)
    assert policy.is_open(waiting=1, running=3, free_slots=1, now=0.0)
    assert not policy.is_open(waiting=1, running=40, free_slots=3, now=1.0)
    assert policy.is_open(waiting=1, running=40, free_slots=4, now=1.1)
    assert not policy.is_open(waiting=5, running=60, free_slots=1, now=2.0)
    assert not policy.is_open(waiting=5, running=60, free_slots=1, now=2.4)
    assert policy.is_open(waiting=5, running=60, free_slots=1, now=2.5)
    assert not policy.is_open(waiting=5, running=63, free_slots=0, now=9.0), "there is no slot"
    assert not policy.is_open(waiting=0, running=8, free_slots=60, now=9.0), "there is nobody"

"""Prefill passes: padding changes nothing that is read, and a budget of several passes gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.session import TargetInputs
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.prefill import PrefillRunner
from trtllm_dflash.runtime.prefill_pass import PassSize, PassSizes, pack, target_inputs
from trtllm_dflash.runtime.slots import SlotState


@given(max_batch_size=st.integers(1, 300), max_num_tokens=st.integers(1, 9000), data=st.data())
def test_every_pass_has_a_size(max_batch_size: int, max_num_tokens: int, data: st.DataObject) -> None:
    sizes = PassSizes(BuildLimits(max_batch_size, 1024, max_num_tokens, 8, 32))
    largest = sizes.largest
    assert largest.tokens >= min(max_num_tokens, 2048)
    requests = data.draw(st.integers(1, largest.requests))
    tokens = data.draw(st.integers(requests, largest.tokens))
    size = sizes.holding(tokens, requests)
    assert size.tokens >= tokens
    assert size.requests >= requests
    listed = sizes.all()
    assert size in listed
    assert largest == listed[0]
    assert all(one.tokens >= other.tokens for one, other in pairwise(listed))


def _inputs(
    tiny_engines: Callable, facts: Sequence[tuple[int, int, int]], size: PassSize, columns: int
) -> TargetInputs:
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    page_tokens = session.limits.page_tokens
    state = SlotState(4, 128, -(-128 // page_tokens), 99, session.target_config.vocab_size, session.device)
    for slot in range(4):
        state.set_pages(slot, [slot + 4 * page for page in range(columns)])
    total = sum(count for _, _, count in facts)
    packed = torch.tensor(pack(list(range(3, 3 + total)), facts, size, state.idle_slot))
    return target_inputs(session, state, packed, size, page_columns=columns, max_query=total)


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    spare=st.tuples(st.integers(0, 30), st.integers(0, 4)),
)
def test_padding_belongs_to_nobody(
    tiny_engines: Callable, parts: list[tuple[int, int]], spare: tuple[int, int]
) -> None:
    facts = [(slot, start, count) for slot, (start, count) in enumerate(parts)]
    total = sum(count for _, count in parts)
    exact = _inputs(tiny_engines, facts, PassSize(total, len(facts)), 4)
    padded = _inputs(tiny_engines, facts, PassSize(total + spare[0], len(facts) + spare[1]), 4)
    positions = [start + i for _, start, count in facts for i in range(count)]
    assert exact.positions.tolist() == positions
    owners = [slot for slot, _, count in facts for _ in range(count)]
    page_tokens = load_session(tiny_engines("llama-v2"), device="cpu").limits.page_tokens
    expected = [
        (slot + 4 * (position // page_tokens)) * page_tokens + position % page_tokens
        for slot, position in zip(owners, positions, strict=True)
    ]
    assert exact.slots.tolist() == expected
    for name in ("input_ids", "positions", "slots"):
        assert torch.equal(getattr(padded, name)[:total], getattr(exact, name))
    for name in ("context_lengths", "logit_rows", "page_table"):
        found = getattr(padded, name)
        assert found is not None
        assert torch.equal(found[: len(facts)], getattr(exact, name))
    assert padded.slots[total:].tolist() == [-1] * spare[0]
    assert padded.query_starts.tolist() == exact.query_starts.tolist() + [total] * spare[1]
    # Positions of padding index the rotation table.
    assert padded.positions.min() >= 0
    assert padded.positions.max() < 128
    assert (padded.page_table[len(facts) :] == 99).all()


@pytest.mark.parametrize("bounds", [(16, 2), (7, 1)], ids=str)
def test_a_budget_of_several_passes_gives_the_same_tokens(
    tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int]
) -> None:
    engines = tiny_engines("llama-v2")
    prompts = [[3 + (i * n) % 50 for i in range(n)] for n in (5, 41, 1, 23, 60, 12)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(engines, device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    real, passes = PrefillRunner.__init__, []

    def bounded(self: PrefillRunner, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self.most_tokens, self.most_requests = bounds

    run = PrefillRunner.run

    def counted(self: PrefillRunner, chunks: Sequence, *arguments: object) -> object:
        passes.append((sum(chunk.count for chunk in chunks), len(chunks)))
        return run(self, chunks, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillRunner, "__init__", bounded)
    monkeypatch.setattr(PrefillRunner, "run", counted)
    with LLM(engines, device="cpu") as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        prefilled = llm.stats().counters["prefill_tokens"]
    assert all(tokens <= bounds[0] and requests <= bounds[1] for tokens, requests in passes)
    assert sum(tokens for tokens, _ in passes) == prefilled == sum(map(len, prompts))


def test_pages_of_several_slots_are_added_at_once(tiny_engines: Callable) -> None:
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    state = SlotState(3, 300, 6, 99, session.target_config.vocab_size, session.device)
    state.set_pages(0, [5, 7])
    state.set_pages(2, [1])
    state.add_pages([(0, 2, [8]), (2, 1, [3, 4])])
    state.add_pages([])
    assert state.page_table.tolist() == [[5, 7, 8, 99, 99, 99], [99] * 6, [1, 3, 4, 99, 99, 99], [99] * 6]

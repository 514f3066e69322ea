"""Forced acceptance commits what was asked for, whatever was verified."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trtllm_dflash.runtime.acceptance import Accepted, force_acceptance
from trtllm_dflash.runtime.slots import SlotState


@pytest.mark.parametrize("mean", [1.0, 2.35, 4.0])
def test_the_mean_over_a_long_request(mean: float) -> None:
    state = SlotState(
        4, history_length=64, pages_per_request=2, scratch_page=9, vocab_size=50, device=torch.device("cpu")
    )
    rows = state.gather(torch.tensor([0, 3]), 2, 4)
    drafts = torch.tensor([[10, 11, 12], [20, 21, 22]])
    nothing = Accepted(torch.full((2, 4), -1), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))
    lengths = torch.tensor([4, 4])
    cycles, generated = 3000, torch.zeros(2, dtype=torch.int64)

    for _ in range(cycles):
        rows = dataclasses.replace(rows, generated=generated)
        forced = force_acceptance(nothing, rows, drafts, lengths, mean)
        assert not forced.faulty.any()
        assert set(forced.accepted.tolist()) <= {int(mean) - 1, int(mean)}
        generated = generated + forced.accepted + 1

    assert (generated / cycles).tolist() == pytest.approx([mean, mean], rel=0.02)
    assert forced.tokens[:, :3].equal(drafts)


def test_never_more_than_the_block_has() -> None:
    state = SlotState(
        1, history_length=64, pages_per_request=2, scratch_page=9, vocab_size=50, device=torch.device("cpu")
    )
    rows = state.gather(torch.tensor([0]), 2, 4)
    drafts = torch.tensor([[10, 11, 12]])
    nothing = Accepted(torch.full((1, 4), -1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))

    accepted = [int(force_acceptance(nothing, rows, drafts, torch.tensor([n]), 4.0).accepted) for n in (0, 1, 2, 4)]

    assert accepted == [0, 0, 1, 3]

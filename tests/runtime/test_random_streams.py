"""Random streams against the published Philox vectors, and their independence of everything but seed and position."""

from __future__ import annotations

import pytest
import torch

from trtllm_dflash.runtime.random_streams import philox4x32, uniforms

# Random123's kat_vectors for "philox4x32 10": counter (4), key (2), result (4). The last is made of digits of pi.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("inputs", "expected"), KNOWN_ANSWERS)
def test_published_vectors(inputs: str, expected: str) -> None:
    c0, c1, c2, c3, k0, k1 = _words(inputs)
    assert [int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1))] == [int(w) for w in _words(expected)]


def test_uniforms_use_seed_as_key_and_position_as_counter() -> None:
    seed = torch.tensor([0])
    first = uniforms(seed, torch.tensor([[0]]))
    expected = [(int(word, 16) >> 8) * 2.0**-24 for word in KNOWN_ANSWERS[0][1].split()]
    assert first.dtype == torch.float32
    assert first.flatten().tolist() == expected


def test_all_ones_seed_and_wide_positions_reach_both_words() -> None:
    seed = torch.tensor([-1, 0xFFFFFFFF, 1 << 32])
    position = torch.tensor([[7, (1 << 32) + 7]] * 3)
    draws = uniforms(seed, position)
    assert len({tuple(row.tolist()) for row in draws.reshape(-1, 4)}) == 6


def test_a_draw_depends_only_on_its_seed_and_position() -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator)
    positions = torch.randint(0, 2**40, (9, 5), generator=generator)
    together = uniforms(seeds, positions)
    assert together.shape == (9, 5, 4)
    for row in (0, 4, 8):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1, 2:3])
        assert torch.equal(alone[0, 0], together[row, 2])


def test_draws_are_in_range_and_uniform() -> None:
    draws = uniforms(torch.arange(64), torch.arange(4096).expand(64, -1)).reshape(-1, 4)
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    counts = torch.stack([torch.histc(draws[:, word], bins=64, min=0.0, max=1.0) for word in range(4)])
    expected = draws.shape[0] / 64
    chi_square = ((counts - expected) ** 2 / expected).sum(dim=1)
    # 63 degrees of freedom: 126 is beyond the 1e-5 quantile, and the draws are fixed, so this cannot flicker.
    assert float(chi_square.max()) < 126.0


def test_words_are_uncorrelated() -> None:
    draws = uniforms(torch.arange(32), torch.arange(4096).expand(32, -1)).reshape(-1, 4)
    correlation = torch.corrcoef(draws.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 5.0 / draws.shape[0] ** 0.5

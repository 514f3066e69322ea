"""Convolution, candidates and selector walk against loops in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from trtllm_dflash.ops.torch_dialect import TorchOps

OPS = TorchOps()


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("block_size", [2, 4])
def test_grouped_dynamic_conv(taps: int, block_size: int) -> None:
    """Taps reach back inside the block only: the first row of a block never reads the block before it."""
    generator = torch.Generator().manual_seed(taps)
    blocks, hidden, group = 3, 12, 4
    x = torch.randn(blocks * block_size, hidden, generator=generator)
    dynamic = torch.randn(blocks * block_size, taps * hidden // group, generator=generator)
    base = torch.randn(taps, hidden, generator=generator)
    found = OPS.grouped_dynamic_conv(x, dynamic, base, block_size)
    for row in range(blocks * block_size):
        for channel in range(hidden):
            total = 0.0
            for tap in range(min(taps, row % block_size + 1)):
                delta = dynamic[row, tap * (hidden // group) + channel // group].double()
                total += float((base[tap, channel].double() + delta) * x[row - tap, channel].double())
            assert float(found[row, channel]) == pytest.approx(total, abs=1e-5)


def _top_k_by_sorting(row: list[float], k: int) -> tuple[list[float], list[int]]:
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]
    return [row[index] for index in order], order


@pytest.mark.parametrize("k", [1, 2, 5, 16, 39, 40])
@pytest.mark.parametrize("levels", [2, 4, 10, 1000])
def test_top_k_with_ties(k: int, levels: int) -> None:
    """Few levels: ties inside the result and at its boundary, decided by the lowest index."""
    draw = random.Random(levels * 100 + k)
    rows = [[float(draw.randrange(levels)) for _ in range(40)] for _ in range(30)]
    values, indices = OPS.top_k(torch.tensor(rows), k)
    for row, found_values, found_indices in zip(rows, values.tolist(), indices.tolist(), strict=True):
        assert (found_values, found_indices) == _top_k_by_sorting(row, k)


def test_top_k_of_equal_entries() -> None:
    values, indices = OPS.top_k(torch.zeros(2, 3, 7), 4)
    assert indices.tolist() == [[[0, 1, 2, 3]] * 3] * 2
    assert values.shape == (2, 3, 4)


class _Walk:
    """A random lattice and a walk over it, row by row in float64."""

    def __init__(self, seed: int, *, batch: int = 6, positions: int = 4, count: int = 5, rank: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        vocab = 40
        self.unary = torch.randn(batch, positions, count, generator=generator)
        self.candidates = torch.stack(
            [torch.randperm(vocab, generator=generator)[:count] for _ in range(batch * positions)]
        ).view(batch, positions, count)
        self.hidden = torch.randn(batch, positions, rank, generator=generator)
        self.predecessor = torch.randn(vocab, rank, generator=generator)
        self.successor = torch.randn(vocab, rank, generator=generator)
        self.anchors = torch.randint(0, vocab, (batch,), generator=generator)
        self.uniforms = torch.rand(batch, positions, generator=generator)

    def run(self, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return OPS.selector_walk(
            self.unary,
            self.candidates,
            self.hidden,
            self.predecessor,
            self.successor,
            self.anchors,
            temperatures,
            self.uniforms,
        )

    def row(self, request: int, position: int, previous: int, temperature: float) -> Tensor:
        """Scores (greedy) or probabilities of the candidates after ``previous``."""
        scores = []
        for column, token in enumerate(self.candidates[request, position].tolist()):
            product = self.predecessor[previous].double() * self.hidden[request, position].double()
            scores.append(self.unary[request, position, column].double() + product @ self.successor[token].double())
        row = torch.stack(scores)
        return row if temperature == 0 else torch.softmax(row / temperature, dim=-1)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_walk(seed: int) -> None:
    walk = _Walk(seed)
    tokens, q_rows = walk.run(torch.zeros(6))
    for request in range(6):
        previous = int(walk.anchors[request])
        for position in range(4):
            best = int(walk.row(request, position, previous, 0.0).argmax())
            previous = int(walk.candidates[request, position, best])
            assert int(tokens[request, position]) == previous
            assert q_rows[request, position].tolist() == [float(column == best) for column in range(5)]


@pytest.mark.parametrize("seed", range(4))
def test_sampled_walk_realises_its_q_rows(seed: int) -> None:
    """q is the softmax after the choice that was really made, and the choice is its inverse CDF."""
    walk = _Walk(seed)
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.5, 0.0, 2.0])
    tokens, q_rows = walk.run(temperatures)
    for request in range(6):
        temperature = float(temperatures[request])
        previous = int(walk.anchors[request])
        for position in range(4):
            row = walk.row(request, position, previous, temperature)
            if temperature > 0:
                torch.testing.assert_close(q_rows[request, position].double(), row, atol=1e-5, rtol=0)
                running, draw = row.cumsum(0), float(walk.uniforms[request, position])
                column = next(c for c in range(5) if float(running[c]) > draw)
            else:
                column = int(row.argmax())
            previous = int(walk.candidates[request, position, column])
            assert int(tokens[request, position]) == previous


def test_greedy_walk_takes_the_first_of_ties() -> None:
    walk = _Walk(0)
    walk.unary.zero_()
    walk.successor.zero_()
    tokens, _ = walk.run(torch.zeros(6))
    assert torch.equal(tokens, walk.candidates[..., 0])


@pytest.mark.parametrize(("draw", "column"), [(0.0, 0), (1.0 - 2.0**-24, 4)])
def test_inverse_cdf_at_its_ends(draw: float, column: int) -> None:
    walk = _Walk(1)
    walk.uniforms.fill_(draw)
    tokens, q_rows = walk.run(torch.ones(6))
    assert torch.equal(tokens, walk.candidates[..., column])
    assert bool((q_rows[..., column] > 0).all())


def test_candidates_of_no_probability_are_never_drawn() -> None:
    """Their q underflows to zero; a draw of 0 and the largest draw must not choose them."""
    walk = _Walk(2)
    walk.unary[..., 0] = -1e4
    walk.unary[..., 4] = -1e4
    for draw in (0.0, 1.0 - 2.0**-24):
        walk.uniforms.fill_(draw)
        tokens, q_rows = walk.run(torch.ones(6))
        chosen = (walk.candidates == tokens.unsqueeze(-1)).to(torch.float32)
        assert bool(((q_rows * chosen).sum(-1) > 0).all())


@pytest.mark.parametrize("seed", range(3))
def test_independent_draw(seed: int) -> None:
    """DFlash 1: every position by itself, softmax over its candidates, inverse CDF; greedy is the first."""
    generator = torch.Generator().manual_seed(seed)
    unary = torch.randn(5, 3, 6, generator=generator).sort(-1, descending=True).values
    candidates = torch.stack([torch.randperm(50, generator=generator)[:6] for _ in range(15)]).view(5, 3, 6)
    uniforms = torch.rand(5, 3, generator=generator)
    temperatures = torch.tensor([0.4, 1.0, 0.0, 2.5, 0.0])
    tokens, q_rows = OPS.independent_draw(unary, temperatures, uniforms, candidates)
    for request in range(5):
        for position in range(3):
            if temperatures[request] == 0:
                column, row = 0, torch.eye(6, dtype=torch.float64)[0]
            else:
                row = torch.softmax(unary[request, position].double() / float(temperatures[request]), dim=-1)
                running = row.cumsum(0)
                column = next(c for c in range(6) if float(running[c]) > float(uniforms[request, position]))
            assert int(tokens[request, position]) == int(candidates[request, position, column])
            torch.testing.assert_close(q_rows[request, position].double(), row, atol=1e-6, rtol=0)

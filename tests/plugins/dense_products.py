"""Tensors of dense products on a GPU, and the comparison with float64 that their tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

# Cluster, stages and early of a launch.
PLANS = [(c, s, e) for c in (1, 2, 4, 8) for s in (2, 5) for e in (1, 2)]


@dataclass
class DrawnProduct:
    """What one random product is of; ``rng`` and ``generator`` go on from there."""

    rng: random.Random
    generator: torch.Generator
    rows: int
    columns: int
    depth: int
    dtype: torch.dtype

    @classmethod
    def linear(cls, seed: int, shapes: tuple[tuple[int, int], ...]) -> DrawnProduct:
        """Of a plain projection: one of ``shapes`` (columns, depth) or any other."""
        rng = random.Random(seed)
        rows = rng.choice((1, 7, 8, 9, 16, 17, 32, rng.randint(1, 32)))
        columns, depth = rng.choice((*shapes, (rng.randint(1, 3000), 64 * rng.randint(1, 100))))
        return cls._of(rng, seed, rows, columns, depth)

    @classmethod
    def gated(cls, seed: int) -> DrawnProduct:
        """Of gate and up, ``columns`` of each."""
        rng = random.Random(seed)
        rows = rng.randint(1, 32)
        columns, depth = rng.choice(((12288, 4096), (8 * rng.randint(1, 400), 64 * rng.randint(1, 64))))
        return cls._of(rng, seed, rows, columns, depth)

    @classmethod
    def _of(cls, rng: random.Random, seed: int, rows: int, columns: int, depth: int) -> DrawnProduct:
        dtype = rng.choice((torch.bfloat16, torch.float16))
        return cls(rng, torch.Generator("cuda").manual_seed(seed), rows, columns, depth, dtype)

    def plan(self) -> tuple[int, int, int]:
        """A cluster that the depth has room for."""
        return self.rng.choice([c for c in (1, 2, 4, 8) if c * 8 * 4 >= self.depth // 64]), 0, 0


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal float32 numbers on the GPU."""
    return torch.randn(shape, generator=generator, device="cuda")


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A result to write into, of NaN."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, least: float) -> None:
    """``found`` is ``x @ weight.T + bias`` after one rounding to its dtype and float32 accumulation.

    2^-20 of the sum of magnitudes bounds the accumulation amply; ``least`` is allowed whatever the size.
    """
    expected, magnitude = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    tolerance = expected.abs() * torch.finfo(found.dtype).eps / 2 + magnitude * 2.0**-20 + least
    excess = ((found.double() - expected).abs() - tolerance).nan_to_num(float("inf"))
    assert excess.max() <= 0, f"{excess.max():.3g} beyond tolerance"

"""Tensors of dense products on a GPU, and the comparison with float64 that their tests share."""

from __future__ import annotations

import torch
from torch import Tensor


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

"""Weight quantisation of linear layers: fp8, int8 and nvfp4, and back.

All three are computed in float32 on blocks of rows, so that the extra memory stays small beside the weight itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch

from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.errors import CheckpointError

WEIGHT, SCALE, SCALE_2 = "weight", "weights_scaling_factor", "weights_scaling_factor_2"
"""Endings of the tensors of a quantised linear (TensorRT-LLM's names)."""

NVFP4_BLOCK = 16
_FP8_MAX, _INT8_MAX, _E2M1_MAX = 448.0, 127.0, 6.0
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS_ELEMENTS = 8 << 20


def quantized_specs(shape: tuple[int, int], algo: QuantAlgo) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor that :func:`quantize` makes of a ``[out, in]`` weight, by ending."""
    out_features, in_features = shape
    if algo == "fp8":
        return {WEIGHT: (torch.float8_e4m3fn, shape), SCALE: (torch.float32, (out_features,))}
    if algo == "int8":
        return {WEIGHT: (torch.int8, shape), SCALE: (torch.float32, (out_features,))}
    if algo == "nvfp4":
        return {
            WEIGHT: (torch.uint8, (out_features, in_features // 2)),
            SCALE: (torch.float8_e4m3fn, (out_features, in_features // NVFP4_BLOCK)),
            SCALE_2: (torch.float32, ()),
        }
    raise ValueError(f"nothing to quantise with algorithm {algo!r}")


def check_quantizable(name: str, in_features: int, algo: QuantAlgo) -> None:
    """Check the input size of a linear (of one rank's part of it) against the algorithm's blocks.

    Raises:
        CheckpointError: nvfp4 and the size is not a multiple of 16.
    """
    if algo == "nvfp4" and in_features % NVFP4_BLOCK:
        raise CheckpointError(
            f"tensor '{name}': {in_features} input columns per rank, expected a multiple of {NVFP4_BLOCK} for nvfp4",
            hint="use another --quantization or --tp-size",
        )


def quantize(weight: torch.Tensor, algo: QuantAlgo) -> dict[str, torch.Tensor]:
    """Quantise a ``[out, in]`` weight, rounding to nearest even.

    * ``fp8``: e4m3 values, scale ``amax(row) / 448``.
    * ``int8``: symmetric, scale ``amax(row) / 127``.
    * ``nvfp4``: e2m1 in blocks of 16 inputs, packed two to a byte (low nibble first); block scale e4m3
      ``amax(block) / 6 / scale_2``; ``scale_2 = amax(weight) / (6 * 448)`` (NVFP4's two-level scaling).

    Args:
        weight: float tensor ``[out, in]``; for nvfp4 ``in`` is a multiple of 16.
        algo: the algorithm, not ``none``.

    Returns:
        tensors by ending, as :func:`quantized_specs` says.
    """
    specs = quantized_specs((weight.shape[0], weight.shape[1]), algo)
    out = {ending: torch.empty(shape, dtype=dtype) for ending, (dtype, shape) in specs.items()}
    if algo == "nvfp4":
        scale_2 = max((float(block.abs().max()) for _, block in _row_blocks(weight)), default=0.0)
        scale_2 = scale_2 / (_E2M1_MAX * _FP8_MAX) or 1.0
        out[SCALE_2].fill_(scale_2)
        for part, block in _row_blocks(weight):
            out[WEIGHT][part], out[SCALE][part] = _nvfp4_rows(block, out[SCALE_2])
        return out
    limit = _FP8_MAX if algo == "fp8" else _INT8_MAX
    for part, block in _row_blocks(weight):
        scale = block.abs().amax(dim=1) / limit
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        scaled = block / scale[:, None]
        rounded = scaled.round_() if algo == "int8" else scaled
        out[WEIGHT][part] = rounded.clamp_(-limit, limit).to(out[WEIGHT].dtype)
        out[SCALE][part] = scale
    return out


def dequantize(
    tensors: Mapping[str, torch.Tensor], algo: QuantAlgo, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The ``[out, in]`` weight that quantised tensors stand for; the definition of each format.

    Args:
        tensors: by ending, as :func:`quantize` returns them. algo: their algorithm. dtype: of the result.
    """
    weight, scale = tensors[WEIGHT], tensors[SCALE]
    if algo in ("fp8", "int8"):
        return (weight.to(torch.float32) * scale[:, None]).to(dtype)
    if algo != "nvfp4":
        raise ValueError(f"nothing to dequantise with algorithm {algo!r}")
    nibbles = torch.stack((weight & 0xF, weight >> 4), dim=-1).flatten(1).to(torch.int64)
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=weight.device)
    values = torch.cat((magnitudes, -magnitudes))[nibbles]
    blocks = values.reshape(len(values), -1, NVFP4_BLOCK)
    scales = scale.to(torch.float32) * tensors[SCALE_2]
    return (blocks * scales[..., None]).flatten(1).to(dtype)


def _row_blocks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    step = max(1, _ROWS_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        part = slice(first, min(first + step, weight.shape[0]))
        yield part, weight[part].to(torch.float32)


def _nvfp4_rows(block: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = block.reshape(len(block), -1, NVFP4_BLOCK)
    scale = (groups.abs().amax(dim=-1) / (_E2M1_MAX * scale_2)).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn)
    step = scale.to(torch.float32) * scale_2
    # A block whose scale rounds to zero reads back as zeros whatever its codes; dividing by infinity makes them zero.
    scaled = groups / torch.where(step > 0, step, torch.full_like(step, float("inf")))[..., None]
    codes = _e2m1_codes(scaled).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code (sign bit 3, magnitude index 0..7), ties to the even magnitude index."""
    magnitudes = values.abs()
    midpoints = [(a + b) / 2 for a, b in pairwise(_E2M1_MAGNITUDES)]
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for below, midpoint in enumerate(midpoints):
        # A tie between codes n and n+1 goes to the even one: up when n is odd.
        codes += (magnitudes >= midpoint) if below % 2 else (magnitudes > midpoint)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)

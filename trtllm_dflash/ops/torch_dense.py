"""Dense operations of the torch dialect: projections, norms, rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN chooses the layout for this many rows; one chosen for a single row is slow for a verified block.
_PACK_ROWS_HINT = 64
_FP8_MAX = 448.0
# A row of zeros divides by this instead of by zero.
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix ``[out, in]`` in oneDNN's blocked layout (CPU only), faster than a plain one for a few rows."""

    blocked: Tensor
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix of float8_e4m3 ``values [out, in]`` with one float32 scale per output, ``scales [1, out]``."""

    values: Tensor
    scales: Tensor


def pack_matrix(weight: Tensor) -> Tensor | PackedMatrix:
    """Prepare ``weight [out, in]`` for :func:`linear`.

    On a CPU with oneDNN the matrix is reordered once (the plain copy may then be freed); elsewhere, and for dtypes
    oneDNN has no matrix product for, it is returned as it is.
    """
    packable = (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
    )
    if not packable:
        return weight
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
    return PackedMatrix(blocked, weight.shape[0], weight.shape[1])


def linear(x: Tensor, weight: Tensor | PackedMatrix | Fp8Matrix, bias: Tensor | None) -> Tensor:
    """``x [N, in] @ weight.T + bias`` → ``[N, out]``."""
    if isinstance(weight, Fp8Matrix):
        return fp8_linear(x, weight, bias)
    if isinstance(weight, PackedMatrix):
        return torch.ops.mkldnn._linear_pointwise(x, weight.blocked, bias, "none", [], "")
    return F.linear(x, weight, bias)


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """``x [N, in]`` rounded to float8 with one scale per row, times a float8 matrix, in float32; result in x's dtype.

    On a GPU the product is torch's row-wise scaled one (SM 89 and newer); on a CPU the same arithmetic in float32.
    """
    values, scales = quantize_rows(x)
    return fp8_product(values, scales, weight, bias, x.dtype)


def fp8_product(values: Tensor, scales: Tensor, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """:func:`fp8_linear` of rows that were rounded before: ``values [N, in]`` and ``scales [N, 1]``."""
    if values.device.type == "cuda":
        out = torch._scaled_mm(
            values, weight.values.t(), scale_a=scales, scale_b=weight.scales, out_dtype=dtype, use_fast_accum=True
        )
    else:
        out = ((values.float() @ weight.values.float().t()) * scales * weight.scales).to(dtype)
    return out if bias is None else out + bias


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3 values ``[N, in]`` and float32 scales ``[N, 1]`` with ``x ≈ values * scales``."""
    scales = (x.abs().amax(-1, keepdim=True).float() / _FP8_MAX).clamp_min(_SMALLEST_SCALE)
    return (x / scales).to(torch.float8_e4m3fn), scales


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis in float32; the result has the weight's dtype."""
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return normed.to(weight.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """``[N, 2 I]`` → ``silu(gate) * up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class RotaryRows:
    """Rotation of N rows: ``cos`` and sign-folded ``sin``, each ``[N, 1, rotary_dim]``."""

    cos: Tensor
    sin: Tensor

    @property
    def rotary_dim(self) -> int:
        return self.cos.shape[-1]


def rotary_rows(cos_sin: Tensor, positions: Tensor) -> RotaryRows:
    """Rows ``positions [N]`` of the table ``cos_sin [max_positions, rotary_dim]``.

    The minus sign of ``rotate_half`` is folded into the sine, so that a rotation is roll, multiply, add.
    """
    cos, sin = cos_sin.index_select(0, positions).chunk(2, dim=-1)
    return RotaryRows(
        torch.cat((cos, cos), dim=-1).unsqueeze(1),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1),
    )


def rotary(x: Tensor, rows: RotaryRows) -> Tensor:
    """Rotate ``x [N, heads, head_dim]``; computed in float32, result in the dtype of ``x``."""
    rotary_dim = rows.rotary_dim
    turned = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    turned = turned.float()
    rotated = torch.addcmul(turned * rows.cos, turned.roll(rotary_dim // 2, dims=-1), rows.sin).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

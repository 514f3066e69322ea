"""Linear layers of a few rows on torch CUDA tensors: bindings of the skinny kernels of ``dflash_select.h``.

A decode or draft-verify step multiplies at most 32 rows by each weight, which costs the reading of the weight and no
more. Both functions start to read the weight before the launch in front of them has finished: **no work in flight on
the stream may write a weight**. The torch definitions are ``torch.nn.functional.linear`` and, for the convolution,
``ops/torch_select.py``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import load_library

MAX_ROWS = 32
# The kernels read a row of the weight in lines of 128 bytes.
DEPTH_MULTIPLE = 64
MAX_TAPS = 4
_FEW_COLUMNS, _MANY_COLUMNS = 2048, 100_000  # between them are the layers, above them the heads
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class _LinearParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "rows", "columns", "depth")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
    )


class _ProjectedConvParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "rows", "block_size", "width", "groups", "taps")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "base", "out", "dynamic_out")),
        ("x_stride", ctypes.c_int64),
    )


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` takes this product; otherwise use ``torch.nn.functional.linear``."""
    return (
        x.dim() == 2
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] % DEPTH_MULTIPLE == 0
        and weight.shape[0] % 2 == 0
        and x.dtype in _DTYPES
        and x.dtype == weight.dtype
        and weight.is_contiguous()
    )


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` beat cuBLAS for such a product on an H200 (``benchmarks/results/kernels.json``)."""
    columns = weight.shape[0]
    return fits(x, weight) and x.shape[0] <= (16 if columns <= _FEW_COLUMNS or columns >= _MANY_COLUMNS else 8)


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` for a few rows, float32 inside, rounded once.

    Args:
        x: ``[M, K]`` bfloat16 or float16, M at most 32, K a multiple of 64; rows may be a slice of a wider matrix.
        weight: ``[N, K]`` contiguous, N even, dtype of x.
        out: ``[M, N]`` to write into, contiguous columns.

    Raises:
        EngineError: tensors that do not fit each other, or a shape no kernel was compiled for.
    """
    _check_operands(x, weight)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _require(
        out.shape == (x.shape[0], weight.shape[0]) and out.dtype == x.dtype and out.stride(1) == 1,
        "out",
        out,
        f"[{x.shape[0]}, {weight.shape[0]}] {x.dtype} with contiguous columns",
    )
    params = _LinearParams(
        struct_size=ctypes.sizeof(_LinearParams),
        dtype=_DTYPES[x.dtype],
        rows=x.shape[0],
        columns=weight.shape[0],
        depth=weight.shape[1],
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    _launch("dflash_skinny_linear", params, x)
    return out


def projected_conv(x: Tensor, weight: Tensor, base: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The kernel projection of a convolved sublayer and the convolution in front of it, in one launch.

    Args:
        x: ``[B*S, H]`` bfloat16 or float16, at most 32 rows, H a multiple of 64.
        weight: ``[2 * taps * groups, H]`` contiguous: side, tap, group.
        base: ``[taps, H]`` contiguous, of the first side; at most 4 taps.
        block_size: S.

    Returns:
        ``grouped_conv(x, linear(x, weight)[:, :side], base, block_size)`` and ``linear(x, weight)[:, side:]``, both
        contiguous; ``side = taps * groups``.
    """
    _check_operands(x, weight)
    taps = base.shape[0]
    _require(
        base.shape == (taps, x.shape[1]) and base.dtype == x.dtype and base.is_contiguous(), "base", base, "[taps, H]"
    )
    _require(weight.shape[0] % (2 * taps) == 0, "weight", weight, f"2 * {taps} * groups rows")
    side = weight.shape[0] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dynamic = torch.empty(x.shape[0], side, dtype=x.dtype, device=x.device)
    params = _ProjectedConvParams(
        struct_size=ctypes.sizeof(_ProjectedConvParams),
        dtype=_DTYPES[x.dtype],
        rows=x.shape[0],
        block_size=block_size,
        width=x.shape[1],
        groups=side // taps,
        taps=taps,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        base=base.data_ptr(),
        out=out.data_ptr(),
        dynamic_out=dynamic.data_ptr(),
        x_stride=x.stride(0),
    )
    _launch("dflash_projected_conv", params, x)
    return out, dynamic


def _check_operands(x: Tensor, weight: Tensor) -> None:
    _require(x.dim() == 2 and x.dtype in _DTYPES and x.stride(1) == 1, "x", x, "[M, K] bfloat16 or float16, dense rows")
    _require(
        weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.dtype == x.dtype and weight.is_contiguous(),
        "weight",
        weight,
        f"contiguous [N, {x.shape[1]}] of {x.dtype}",
    )


def _launch(name: str, params: ctypes.Structure, x: Tensor) -> None:
    if not x.is_cuda:
        raise EngineError(f"x: is on {x.device}, expected a CUDA device")
    with torch.cuda.device(x.device):
        launch = load_library().function(name, (ctypes.c_void_p, ctypes.c_void_p))
        launch(ctypes.byref(params), torch.cuda.current_stream().cuda_stream)


def _require(condition: bool, name: str, tensor: Tensor, expected: str) -> None:
    if not condition:
        raise EngineError(f"{name}: got {tuple(tensor.shape)} {tensor.dtype}, expected {expected}")

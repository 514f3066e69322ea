"""Dense products of a few rows on torch CUDA tensors: the weight is read once, at the speed of the memory.

Thin ctypes bindings of ``plugins/include/dflash_dense.h``: they check what the kernel cannot check (devices, dtypes,
shapes, contiguity) and launch on the current stream. Nothing here synchronises; everything may run under CUDA graph
capture. A launch overlaps the one in front of it and reads its weight at once: a weight must not be the result of the
launch in front.

Of a float8 weight (``Fp8Matrix``) half the bytes are read. It is multiplied by x as it is, where ``fp8_linear``, made
for many rows, rounds x to float8 too.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import torch_dense
from trtllm_dflash.ops.plugin_library import load_library
from trtllm_dflash.ops.torch_dense import Fp8Matrix

MAX_ROWS = 32
MAX_DEPTH = 16384
DEPTH_MULTIPLE = 64
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class _SkinnyParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "rows", "columns", "depth", "gated")),
        *((name, ctypes.c_int32) for name in ("cluster", "stages", "early")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
    )


# dtype; x and its stride; values and scales; rows, width; stream.
_QUANTIZE_ROWS_ARGUMENTS = (
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
)


def takes(x: Tensor, weight: Tensor | Fp8Matrix) -> bool:
    """Whether :func:`skinny_linear` and :func:`skinny_gate_up` take this product."""
    dtype = x.dtype
    if isinstance(weight, Fp8Matrix):
        if not weight.scales.is_contiguous() or weight.scales.dtype != torch.float32:
            return False
        weight, dtype = weight.values, torch.float8_e4m3fn
    return (
        x.dim() == 2
        and x.shape[0] <= MAX_ROWS
        and x.dtype in _DTYPES
        and weight.dim() == 2
        and weight.dtype == dtype
        and weight.is_contiguous()
        and x.shape[1] % DEPTH_MULTIPLE == 0
        and x.shape[1] <= MAX_DEPTH
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def worthwhile(x: Tensor, weight: Tensor | Fp8Matrix) -> bool:
    """Whether the kernels here are the faster way on an H200 (``linear_us`` of ``benchmarks.kernels``).

    Above 16 rows cuBLAS is, for weights of either kind: every block of the kernel reads all of x.
    """
    return x.shape[0] <= 16 and takes(x, weight)


def skinny_linear(
    x: Tensor,
    weight: Tensor | Fp8Matrix,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    plan: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """``x @ weight.T + bias`` of at most 32 rows, float32 accumulation, the same bits in every run.

    Args:
        x: ``[M, K]`` bfloat16 or float16; K a multiple of 64 up to 16384; rows may be a slice of a wider matrix.
        weight: ``[N, K]`` contiguous, dtype of x, or of float8. bias: ``[N]`` contiguous, dtype of x.
        out: ``[M, N]`` to write into; rows may be a slice of a wider matrix.
        plan: cluster, stages and early of ``dflash_skinny_params``; 0 = chosen (tests, tuning).

    Raises:
        EngineError: tensors that do not fit each other, or a shape no kernel was compiled for.
    """
    return _launch(x, weight, bias, out, _rows(weight), gated=False, plan=plan)


def skinny_gate_up(
    x: Tensor, weight: Tensor | Fp8Matrix, *, out: Tensor | None = None, plan: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` with ``weight [2 * I, K]`` = gate rows, then up rows → ``[M, I]``.

    Gate and up are rounded to the dtype of x before they meet, as ``swiglu`` of a stored product sees them. Arguments
    and errors otherwise as :func:`skinny_linear`.
    """
    rows = _rows(weight)
    if rows % 2:
        shape = tuple(_stored(weight).shape)
        raise EngineError(f"weight: got {shape}, expected an even number of rows (gate, then up)")
    return _launch(x, weight, None, out, rows // 2, gated=True, plan=plan)


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """:func:`trtllm_dflash.ops.torch_dense.fp8_linear` of any number of rows, x rounded by :func:`quantize_rows`."""
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.shape[1] % 8 or x.data_ptr() % 16:
        return torch_dense.fp8_linear(x, weight, bias)
    values, scales = quantize_rows(x)
    return torch_dense.fp8_product(values, scales, weight, bias, x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`trtllm_dflash.ops.torch_dense.quantize_rows`, in one launch.

    Args:
        x: ``[N, K]`` bfloat16 or float16, K a multiple of 8; rows may be a slice of a wider matrix.

    Returns:
        float8_e4m3 values ``[N, K]`` and float32 scales ``[N, 1]``.

    Raises:
        EngineError: a tensor that the kernel does not take.
    """
    if not x.is_cuda or x.dtype not in _DTYPES or x.dim() != 2 or x.stride(1) != 1:
        raise EngineError(
            f"x: got {tuple(x.shape)} {x.dtype} on {x.device}, expected [N, K] bfloat16 or float16 on CUDA"
        )
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        launch = load_library().function(
            "dflash_quantize_rows",
            _QUANTIZE_ROWS_ARGUMENTS,
        )
        stream = torch.cuda.current_stream().cuda_stream
        tensors = (x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr())
        launch(_DTYPES[x.dtype], *tensors, rows, width, stream)
    return values, scales


def _stored(weight: Tensor | Fp8Matrix) -> Tensor:
    return weight.values if isinstance(weight, Fp8Matrix) else weight


def _rows(weight: Tensor | Fp8Matrix) -> int:
    return _stored(weight).shape[0]


def _launch(
    x: Tensor,
    matrix: Tensor | Fp8Matrix,
    bias: Tensor | None,
    out: Tensor | None,
    columns: int,
    *,
    gated: bool,
    plan: tuple[int, int, int],
) -> Tensor:
    if not x.is_cuda or x.dtype not in _DTYPES or x.dim() != 2 or x.stride(1) != 1:
        raise EngineError(
            f"x: got {tuple(x.shape)} {x.dtype} on {x.device}, expected [M, K] bfloat16 or float16 on CUDA"
        )
    depth = x.shape[1]
    weight, scales = _stored(matrix), None
    if isinstance(matrix, Fp8Matrix):
        scales = matrix.scales
        _check_float8(matrix, x.device)
    if weight.dim() != 2 or weight.shape[1] != depth or not weight.is_contiguous():
        raise EngineError(f"weight: got {tuple(weight.shape)}, expected contiguous [N, {depth}]")
    if out is None:
        out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    elif out.shape != (x.shape[0], columns) or out.stride(1) != 1:
        raise EngineError(f"out: got {tuple(out.shape)}, expected [{x.shape[0]}, {columns}] with dense rows")
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        raise EngineError(f"bias: got {tuple(bias.shape)}, expected contiguous [{columns}]")
    for name, tensor in (("weight", weight if scales is None else None), ("bias", bias), ("out", out)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise EngineError(f"{name}: got {tensor.dtype} on {tensor.device}, expected {x.dtype} on {x.device}")
    cluster, stages, early = plan
    params = _SkinnyParams(
        struct_size=ctypes.sizeof(_SkinnyParams),
        dtype=_DTYPES[x.dtype],
        rows=x.shape[0],
        columns=columns,
        depth=depth,
        gated=gated,
        cluster=cluster,
        stages=stages,
        early=early,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        if scales is None:
            launch = load_library().function("dflash_skinny_gemm", (ctypes.c_void_p, ctypes.c_void_p))
            launch(ctypes.byref(params), stream)
        else:
            arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
            launch = load_library().function("dflash_skinny_gemm_float8", arguments)
            launch(ctypes.byref(params), scales.data_ptr(), stream)
    return out


def _check_float8(matrix: Fp8Matrix, device: torch.device) -> None:
    values, scales = matrix.values, matrix.scales
    if values.dtype != torch.float8_e4m3fn or values.device != device:
        raise EngineError(f"weight: got {values.dtype} on {values.device}, expected float8_e4m3fn on {device}")
    if (
        scales.shape != (1, values.shape[0])
        or not scales.is_contiguous()
        or scales.dtype != torch.float32
        or scales.device != device
    ):
        raise EngineError(
            f"scales: got {tuple(scales.shape)} {scales.dtype} on {scales.device}, expected contiguous "
            f"[1, {values.shape[0]}] float32 on {device}"
        )

"""Dense products of a few rows at Qwen3-8B's shapes: ours and cuBLAS against reading the weight once.

``benchmarks.kernels`` merges :func:`measure` with the other kernels. Every time is a median over replays of one CUDA
graph that runs the same product with different weights, more than the L2 holds; shares are of the largest copy rate of
the same run. The layer is the dense part of a decoder layer with its norms, without attention; cuBLAS's side of gate
and up, and of the layer, is ``F.linear`` with the separate SwiGLU kernel. With a float8 weight the other side rounds x
to float8 (in our one launch) and takes ``torch._scaled_mm``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_timing import copy_bytes_per_us, time_us
from trtllm_dflash.ops import cuda_dense, cuda_fused
from trtllm_dflash.ops.torch_dense import Fp8Matrix

HIDDEN, INTERMEDIATE, QKV, VOCABULARY = 4096, 12288, 6144, 151936
# Output and input columns of plain products: QKV, attention output, down, head, convolution kernels, selector.
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE), (VOCABULARY, HIDDEN), (1024, HIDDEN), (256, HIDDEN))
FLOAT8_SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE))  # what is stored in float8
ROWS = (1, 8, 16, 32)
LAYERS, COPIES_BYTES, MOST_COPIES, EPS = 12, 1 << 30, 40, 1e-6

W = TypeVar("W", Tensor, Fp8Matrix)
Product = Callable[[Tensor, W], Tensor]
Make = Callable[[int, int, int], list[W]]


def weights(rows: int, columns: int, copies: int) -> list[Tensor]:
    scale = columns**-0.5
    return [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=scale) for _ in range(copies)]


def float8_weights(rows: int, columns: int, copies: int) -> list[Fp8Matrix]:
    """Normal values of standard deviation 60: the largest float8, 448, is more than seven of these away."""
    scales = torch.full((1, rows), columns**-0.5 / 60, device="cuda")
    return [
        Fp8Matrix(torch.empty(rows, columns, device="cuda").normal_(std=60).to(torch.float8_e4m3fn), scales.clone())
        for _ in range(copies)
    ]


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def cublas_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    return cuda_fused.swiglu(F.linear(x, weight))


def float8_linear(x: Tensor, weight: Fp8Matrix) -> Tensor:
    return cuda_dense.fp8_linear(x, weight, None)


def float8_gate_up(x: Tensor, weight: Fp8Matrix) -> Tensor:
    return cuda_fused.swiglu(float8_linear(x, weight))


def measure_product(
    name: str,
    shape: tuple[int, int],
    ours: Product[W],
    theirs: Product[W],
    peak: float,
    make: Make[W],
    element_bytes: int,
) -> dict[str, float]:
    """``NAME_us/SHAPE``, ``NAME_peak/SHAPE`` and the same of cuBLAS, for every number of rows."""
    columns, depth = shape
    figures: dict[str, float] = {}
    size = columns * depth * element_bytes
    stored = make(columns, depth, max(2, min(MOST_COPIES, COPIES_BYTES // size)))
    for rows in ROWS:
        x, key = normal(rows, depth), f"{columns}x{depth}_m{rows}"
        times = {
            name: time_us([lambda w=w, x=x: ours(x, w) for w in stored]),
            f"{name}_cublas": time_us([lambda w=w, x=x: theirs(x, w) for w in stored]),
        }
        for label, elapsed in times.items():
            figures[f"{label}_us/{key}"] = round(elapsed, 2)
            figures[f"{label}_peak/{key}"] = round(size / elapsed / peak, 3)
        print(f"{name} {key:<24}" + "".join(f"{us:>8.1f}{size / us / peak:>7.2f}" for us in times.values()), flush=True)
    return figures


def measure_layer(
    peak: float,
    label: str,
    make: Make[W],
    element_bytes: int,
    ways: dict[str, tuple[Product[W], Product[W]]],
) -> dict[str, float]:
    """``LABEL_us/mROWS`` of one layer's dense part in a chain of layers, the same of cuBLAS, and the weights' floor.

    ``ways`` are linear and gated of each, by what their name has after the label.
    """
    figures: dict[str, float] = {}
    shapes = {
        "qkv": (QKV, HIDDEN),
        "dense": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    layers = [{name: make(*shape, 1)[0] for name, shape in shapes.items()} for _ in range(LAYERS)]
    floor = sum(columns * depth * element_bytes for columns, depth in shapes.values()) / peak
    figures[f"{label}_floor_us"] = round(floor, 1)
    scale = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(
        layer_weights: dict[str, W],
        residual: Tensor,
        x: Tensor,
        linear: Product[W],
        gated: Product[W],
    ) -> None:
        normed = cuda_fused.add_rms_norm(x, residual, scale, EPS)
        qkv = linear(normed, layer_weights["qkv"])
        mixed = linear(qkv[:, :HIDDEN], layer_weights["dense"])
        normed = cuda_fused.add_rms_norm(mixed, residual, scale, EPS)
        linear(gated(normed, layer_weights["gate_up"]), layer_weights["down"])

    for tokens in ROWS:
        x, residual = normal(tokens, HIDDEN), torch.randn(tokens, HIDDEN, device="cuda")
        for way, (linear, gated) in ways.items():
            calls = [
                lambda w=w, x=x, r=residual, linear=linear, gated=gated: layer(w, r, x, linear, gated) for w in layers
            ]
            figures[f"{label}{way}_us/m{tokens}"] = round(time_us(calls), 1)
        times = "".join(f"{figures[f'{label}{way}_us/m{tokens}']:>15.1f}" for way in ways)
        print(f"{label} m{tokens}, floor {floor:.1f}{times}", flush=True)
    return figures


def measure_float8(peak: float) -> dict[str, float]:
    """Figures of products with a float8 weight; ``peak`` in bytes per microsecond."""
    ours, gated, theirs = cuda_dense.skinny_linear, cuda_dense.skinny_gate_up, float8_linear
    figures = measure_product(
        "gate_up_float8", (2 * INTERMEDIATE, HIDDEN), gated, float8_gate_up, peak, float8_weights, 1
    )
    for shape in FLOAT8_SHAPES:
        figures |= measure_product("linear_float8", shape, ours, theirs, peak, float8_weights, 1)
    ways = {"": (ours, gated), "_cublas": (theirs, float8_gate_up)}
    return figures | measure_layer(peak, "layer_float8", float8_weights, 1, ways)


def measure() -> dict[str, float]:
    """All figures of this file; the part after the slash is output columns x input columns, and rows."""
    peak = copy_bytes_per_us(4 << 30)
    print(f"{'product':<39}{'ours us':>8}{'share':>7}{'cuBLAS':>8}{'share':>7}")
    ours, gated = cuda_dense.skinny_linear, cuda_dense.skinny_gate_up
    figures = measure_product("gate_up", (2 * INTERMEDIATE, HIDDEN), gated, cublas_gate_up, peak, weights, 2)
    for shape in SHAPES:
        figures |= measure_product("linear", shape, ours, F.linear, peak, weights, 2)
    ways = {"": (ours, gated), "_cublas": (F.linear, cublas_gate_up)}
    return figures | measure_layer(peak, "layer", weights, 2, ways) | measure_float8(peak)

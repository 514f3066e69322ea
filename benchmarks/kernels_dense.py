"""Dense products of a few rows at Qwen3-8B's shapes: ours and cuBLAS against reading the weight once.

``benchmarks.kernels`` merges :func:`measure` with the other kernels. Every time is a median over replays of one CUDA
graph that runs the same product with different weights, more than the L2 holds; shares are of the largest copy rate of
the same run. The layer is the dense part of a decoder layer with its norms, without attention; cuBLAS's side of gate
and up, and of the layer, is ``F.linear`` with the separate SwiGLU kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels_attention import copy_bytes_per_us, time_us
from trtllm_dflash.ops import cuda_dense, cuda_fused

HIDDEN, INTERMEDIATE, QKV, VOCABULARY = 4096, 12288, 6144, 151936
# Output and input columns of plain products: QKV, attention output, down, head, convolution kernels, selector.
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE), (VOCABULARY, HIDDEN), (1024, HIDDEN), (256, HIDDEN))
ROWS = (1, 8, 16, 32)
LAYERS, COPIES_BYTES, MOST_COPIES, EPS = 12, 1 << 30, 40, 1e-6

Product = Callable[[Tensor, Tensor], Tensor]


def weights(rows: int, columns: int, copies: int) -> list[Tensor]:
    scale = columns**-0.5
    return [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=scale) for _ in range(copies)]


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def cublas_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    return cuda_fused.swiglu(F.linear(x, weight))


def measure_product(name: str, shape: tuple[int, int], ours: Product, theirs: Product, peak: float) -> dict[str, float]:
    """``NAME_us/SHAPE``, ``NAME_peak/SHAPE`` and the same of cuBLAS, for every number of rows."""
    columns, depth = shape
    figures: dict[str, float] = {}
    size = columns * depth * 2
    stored = weights(columns, depth, max(2, min(MOST_COPIES, COPIES_BYTES // size)))
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


def measure_layer(peak: float) -> dict[str, float]:
    """``layer_us/mROWS`` of one layer's dense part in a chain of layers, the same of cuBLAS, and the weights' floor."""
    figures: dict[str, float] = {}
    shapes = {
        "qkv": (QKV, HIDDEN),
        "dense": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    layers = [{name: weights(*shape, 1)[0] for name, shape in shapes.items()} for _ in range(LAYERS)]
    figures["layer_floor_us"] = round(sum(weight.numel() * 2 for weight in layers[0].values()) / peak, 1)
    scale = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(layer_weights: dict[str, Tensor], residual: Tensor, x: Tensor, linear: Product, gated: Product) -> None:
        normed = cuda_fused.add_rms_norm(x, residual, scale, EPS)
        qkv = linear(normed, layer_weights["qkv"])
        mixed = linear(qkv[:, :HIDDEN], layer_weights["dense"])
        normed = cuda_fused.add_rms_norm(mixed, residual, scale, EPS)
        linear(gated(normed, layer_weights["gate_up"]), layer_weights["down"])

    for tokens in ROWS:
        x, residual = normal(tokens, HIDDEN), torch.randn(tokens, HIDDEN, device="cuda")
        for label, linear, gated in (
            ("layer_us", cuda_dense.skinny_linear, cuda_dense.skinny_gate_up),
            ("layer_cublas_us", F.linear, cublas_gate_up),
        ):
            calls = [
                lambda w=w, x=x, r=residual, linear=linear, gated=gated: layer(w, r, x, linear, gated) for w in layers
            ]
            figures[f"{label}/m{tokens}"] = round(time_us(calls), 1)
    return figures


def measure() -> dict[str, float]:
    """All figures of this file; the part after the slash is output columns x input columns, and rows."""
    peak = copy_bytes_per_us(4 << 30)
    print(f"{'product':<31}{'ours us':>8}{'share':>7}{'cuBLAS':>8}{'share':>7}")
    figures = measure_product("gate_up", (2 * INTERMEDIATE, HIDDEN), cuda_dense.skinny_gate_up, cublas_gate_up, peak)
    for shape in SHAPES:
        figures |= measure_product("linear", shape, cuda_dense.skinny_linear, F.linear, peak)
    return figures | measure_layer(peak)

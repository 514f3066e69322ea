"""Dense products of a few rows against the copy roofline and torch's own: ``python -m benchmarks.kernels_dense``.

Every time is a median over replays of one CUDA graph that runs the same product with many different weights, more than
the L2 holds. The layer is the dense part of a Qwen3-8B decoder layer with its norms, with attention left out; torch's
side of it is ``F.linear`` with the separate SwiGLU kernel. Writes ``benchmarks/results/kernels_dense.json``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels_attention import Roofline, time_us
from benchmarks.result_file import write_result
from trtllm_dflash.ops import cuda_attention, cuda_dense

HIDDEN, INTERMEDIATE, QKV = 4096, 12288, 6144
PRODUCTS = {
    "qkv": (QKV, HIDDEN),
    "dense": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "conv_projection": (256, HIDDEN),
}
ROWS = (1, 8, 16, 32)
LAYERS, COPIES_BYTES, EPS = 12, 1 << 30, 1e-6

Product = Callable[[Tensor, Tensor], Tensor]


def weights(rows: int, columns: int, copies: int) -> list[Tensor]:
    scale = columns**-0.5
    return [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=scale) for _ in range(copies)]


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def torch_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    return cuda_attention.swiglu(F.linear(x, weight))


def measure_products(roofline: Roofline) -> dict[str, float]:
    """``NAME_mROWS_us``, its share of the peak copy bandwidth, and how much longer torch takes."""
    figures: dict[str, float] = {}
    print(f"{'product':<24}{'us':>8}{'torch':>8}{'of peak':>9}")
    for name, (rows, columns) in PRODUCTS.items():
        stored = weights(rows, columns, min(60, COPIES_BYTES // (rows * columns * 2) + 1))
        gated = name == "gate_up"
        ours: Product = cuda_dense.skinny_gate_up if gated else cuda_dense.skinny_linear
        theirs: Product = torch_gate_up if gated else F.linear
        for tokens in ROWS:
            x = normal(tokens, columns)
            elapsed = time_us([lambda w=w, x=x, ours=ours: ours(x, w) for w in stored])
            compared = time_us([lambda w=w, x=x, theirs=theirs: theirs(x, w) for w in stored])
            key = f"{name}_m{tokens}"
            figures[f"{key}_us"] = round(elapsed, 2)
            figures[f"{key}_peak"] = round(rows * columns * 2 / elapsed / roofline.peak, 3)
            figures[f"{key}_torch_over_ours"] = round(compared / elapsed, 3)
            print(f"{key:<24}{elapsed:>8.1f}{compared:>8.1f}{figures[f'{key}_peak']:>9.2f}", flush=True)
        del stored
        torch.cuda.empty_cache()
    return figures


def measure_layer(roofline: Roofline) -> dict[str, float]:
    """Microseconds of one layer's dense part in a chain of layers, ours and torch's."""
    figures: dict[str, float] = {}
    layers = [
        {name: weights(*shape, 1)[0] for name, shape in PRODUCTS.items() if name != "conv_projection"}
        for _ in range(LAYERS)
    ]
    layer_bytes = sum(weight.numel() * 2 for weight in layers[0].values())
    figures["layer_floor_us"] = round(layer_bytes / roofline.peak, 1)
    scale = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(layer_weights: dict[str, Tensor], residual: Tensor, x: Tensor, linear: Product, gated: Product) -> None:
        normed = cuda_attention.add_rms_norm(x, residual, scale, EPS)
        qkv = linear(normed, layer_weights["qkv"])
        mixed = linear(qkv[:, :HIDDEN], layer_weights["dense"])
        normed = cuda_attention.add_rms_norm(mixed, residual, scale, EPS)
        linear(gated(normed, layer_weights["gate_up"]), layer_weights["down"])

    for tokens in ROWS:
        x, residual = normal(tokens, HIDDEN), torch.randn(tokens, HIDDEN, device="cuda")
        for label, linear, gated in (
            ("us", cuda_dense.skinny_linear, cuda_dense.skinny_gate_up),
            ("torch_us", F.linear, torch_gate_up),
        ):
            calls = [
                lambda w=w, x=x, r=residual, linear=linear, gated=gated: layer(w, r, x, linear, gated) for w in layers
            ]
            figures[f"layer_m{tokens}_{label}"] = round(time_us(calls), 1)
        print(f"layer m{tokens}: {figures[f'layer_m{tokens}_us']} us, torch {figures[f'layer_m{tokens}_torch_us']} us")
    return figures


def main() -> None:
    roofline = Roofline()
    figures = {"copy_peak_tb_s": round(roofline.peak / 1e6, 3)}
    figures |= measure_products(roofline)
    figures |= measure_layer(roofline)
    shapes = {name: f"[M, {columns}] x [{rows}, {columns}], bf16" for name, (rows, columns) in PRODUCTS.items()}
    print(write_result("kernels_dense", figures, shapes=shapes))


if __name__ == "__main__":
    main()

"""Linear layers of a few rows at Qwen3-8B's shapes: ours and cuBLAS against reading the weight once.

``benchmarks.kernels`` merges :func:`measure` with the other kernels. Weights rotate beyond the L2 cache; the share is
of the largest copy rate of the same run.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.kernels_attention import copy_bytes_per_us, time_us
from trtllm_dflash.ops import cuda_linear

# Output and input columns: QKV, attention output, gate and up, down, head, convolution kernels, selector.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (1024, 4096), (256, 4096))
ROWS = (1, 8, 16, 32)


def measure() -> dict[str, float]:
    """Microseconds of both and their share of the copy rate, per shape and number of rows."""
    figures: dict[str, float] = {}
    peak = copy_bytes_per_us(4 << 30)
    print(f"{'columns x depth, rows':<26}{'cuBLAS us':>10}{'share':>7}{'ours us':>9}{'share':>7}{'ratio':>7}")
    for columns, depth in SHAPES:
        size = columns * depth * 2
        weights = [
            torch.empty(columns, depth, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
            for _ in range(max(2, min(40, (1 << 30) // size)))
        ]
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            theirs = time_us([lambda w=w, x=x: F.linear(x, w) for w in weights])
            ours = time_us([lambda w=w, x=x: cuda_linear.linear(x, w) for w in weights])
            key = f"{columns}x{depth}_m{rows}"
            figures[f"linear_us/{key}"], figures[f"linear_cublas_us/{key}"] = round(ours, 2), round(theirs, 2)
            figures[f"linear_peak/{key}"] = round(size / ours / peak, 3)
            figures[f"linear_cublas_peak/{key}"] = round(size / theirs / peak, 3)
            print(
                f"{key:<26}{theirs:>10.1f}{size / theirs / peak:>7.2f}{ours:>9.1f}{size / ours / peak:>7.2f}"
                f"{theirs / ours:>7.2f}",
                flush=True,
            )
        del weights
    return figures

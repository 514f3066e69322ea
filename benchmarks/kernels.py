"""Kernel figures: ``python -m benchmarks.kernels`` on a CUDA GPU; ``--parts select,dense`` makes some of them, and
``--build`` times the fat binary, without a GPU.

Both merge into ``benchmarks/results/kernels.json``; each part keeps the machine that made it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.result_file import write_result

PARTS = ("select", "dense", "attention")
SHAPES = {
    "attention": "32/8 heads, head_dim 128, bf16, B 1..64, context 4k..32k, S 8 and 16",
    "linear": "Qwen3-8B's weights, 1 to 32 rows, bf16 and float8; a layer's dense part with its norms",
    "selection": "V 151936 and 152064, K 16, rank 256, S 8",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="time the build for every SM instead of measuring kernels")
    parser.add_argument("--no-torch", action="store_true", help="skip the comparison with torch's attention")
    parser.add_argument("--parts", default=",".join(PARTS), help="which kernels to measure (default: %(default)s)")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    # Written part by part: the comparison compiles FlexAttention, takes longest and fails easiest.
    for figures in (build_figures(),) if options.build else gpu_figures(parts, compare=not options.no_torch):
        width = max(map(len, figures))
        for key, value in figures.items():
            print(f"{key:{width}}  {value:.4g}")
        print(write_result("kernels", figures, shapes=SHAPES), flush=True)


def build_figures() -> dict[str, float]:
    """Seconds to compile every kernel for every SM, from nothing: by the clock, and of the processors, which a busy
    machine does not lengthen."""
    from trtllm_dflash.ops.plugin_build import DEFAULT_SMS, build_library

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        report = build_library(DEFAULT_SMS, Path(folder) / "libdflash_plugins.so")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"fat_binary_build_s": round(report.elapsed_s, 1), "fat_binary_build_cpu_s": round(processors, 1)}


def gpu_figures(parts: Sequence[str], *, compare: bool) -> Iterator[dict[str, float]]:
    """Every kernel's time against the roofline measured in the same run."""
    from benchmarks import kernels_attention, kernels_dense, kernels_select

    if "select" in parts:
        yield kernels_select.measure()
    if "dense" in parts:
        yield kernels_dense.measure()
    if "attention" in parts:
        yield kernels_attention.measure()
        if compare:
            yield kernels_attention.compare_with_torch()


if __name__ == "__main__":
    main()

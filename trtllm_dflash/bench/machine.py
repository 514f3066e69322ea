"""The machine under measurement: what it is, and how steady it is."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import trtllm_dflash

_PACKAGES = ("torch", "transformers", "tokenizers", "tensorrt", "tensorrt-rtx-cu13", "nvidia-pytriton", "aiperf")
NOISE_LIMIT = 0.10


def machine_facts() -> dict[str, object]:
    """Kind of processor and GPUs, and versions; no names of hosts, users or paths."""
    import torch

    versions = {"python": platform.python_version(), "trtllm-dflash": trtllm_dflash.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "processor": f"{platform.machine()}, {_cores()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


@dataclass(frozen=True)
class Steadiness:
    """One look at the machine: milliseconds of the same small piece of work, and the load average of one minute."""

    probe_ms: float
    load_average: float


def probe() -> Steadiness:
    """Time a fixed piece of single-core work (median of 5, about 50 ms in all)."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        total = 0
        for value in range(200_000):
            total += value & 7
        times.append((time.perf_counter() - begun) * 1e3)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Steadiness(statistics.median(times), load)


def noise_warnings(probes: Sequence[Steadiness], spreads: Sequence[tuple[str, float]]) -> list[str]:
    """Say where the machine was too unsteady for its figures to be trusted.

    Args:
        probes: taken between points. spreads: (point, relative half-width of its confidence interval or of its range).
    """
    warnings = []
    if len(probes) >= 3:
        ordered = sorted(one.probe_ms for one in probes)
        drift = ordered[-1 - len(ordered) // 10] / statistics.median(ordered) - 1
        if drift > NOISE_LIMIT:
            warnings.append(
                f"this machine is noisy: the same small piece of work took up to {drift:.0%} longer than its median "
                "between points; stop what else runs here, fix clocks, or add --repeats"
            )
    wide = [(name, spread) for name, spread in spreads if spread > NOISE_LIMIT]
    if wide:
        name, spread = max(wide, key=lambda item: item[1])
        warnings.append(
            f"{len(wide)} of {len(spreads)} points are uncertain by more than {NOISE_LIMIT:.0%} "
            f"(worst: {name}, ±{spread:.0%}); differences smaller than that say nothing"
        )
    return warnings


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

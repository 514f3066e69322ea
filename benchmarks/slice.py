"""The first slice's figures: exactness against transformers and the public reference, and CPU speed.

    python -m benchmarks.slice --data ../shared/data --v1-drafter ../shared/models/smollm2-135m-dflash

Parts can be run alone (``--parts greedy,acceptance,scores,chi-square,speed,quickstart,triton``); figures are merged
into ``benchmarks/results/slice.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from benchmarks.slice_chi_square import chi_square_figures
from benchmarks.slice_greedy import greedy_figures
from benchmarks.slice_reference import acceptance_figures, score_figures
from benchmarks.slice_speed import speed_figures
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build

PARTS = ("greedy", "acceptance", "scores", "chi-square", "speed", "quickstart", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--v1-drafter", type=Path, required=True, help="the DFlash v1 drafter of the demo target")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the prompts and draws, for a dry run")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    prompts = arguments.data / "gsm8k_test.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        engines = _engines(Path(folder), arguments.v1_drafter)
        for part in parts:
            started = time.perf_counter()
            figures, details = _run(part, engines, prompts, arguments.scale)
            details["seconds"] = round(time.perf_counter() - started, 1)
            print(f"{part}: {json.dumps(figures)}", flush=True)
            if arguments.scale == 1.0:
                shapes = {"pair": "SmolLM2-135M-Instruct + DFlash 2 / DFlash drafter, float32, block size 8"}
                print(write_result("slice", figures, shapes=shapes, details={part: details}), flush=True)


def _engines(folder: Path, v1_drafter: Path) -> dict[int, Path]:
    """Engine directories by drafter version."""
    engines = {}
    for version, drafter in ((2, "demo"), (1, str(v1_drafter))):
        convert("demo", drafter, folder / f"checkpoint{version}")
        engines[version] = folder / f"engines{version}"
        build(folder / f"checkpoint{version}", engines[version])
    return engines


def _run(part: str, engines: dict[int, Path], prompts: Path, scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    if part == "greedy":
        return greedy_figures(engines[2], prompts, count=max(2, int(50 * scale)), max_tokens=128)
    if part == "acceptance":
        return acceptance_figures(engines, prompts, count=max(2, int(20 * scale)), max_tokens=128)
    if part == "scores":
        return score_figures(engines, prompts, count=max(2, int(20 * scale)))
    if part == "chi-square":
        return chi_square_figures(engines, draws=max(500, int(20_000 * scale)))
    if part == "speed":
        return speed_figures(engines[2], prompts, count=max(2, int(20 * scale)), max_tokens=128, repeats=3)
    if part == "quickstart":
        return _quickstart()
    from benchmarks.triton_slice import triton_figures

    return triton_figures(engines[2], prompts, disconnects=max(5, int(200 * scale)))


def _quickstart() -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trtllm_dflash", "quickstart", "--json", "--workdir", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    return {"quickstart_s": facts["quickstart_s"], "convert_peak_mb": facts["convert_peak_mb"]}, {"facts": facts}


if __name__ == "__main__":
    main()

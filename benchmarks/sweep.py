"""Pareto sweeps of the demo pair and of Qwen3-8B's shape; resumption, served against in process, AIPerf against ours.

    python -m benchmarks.sweep --data ../shared/data --v1-drafter ../shared/models/smollm2-135m-dflash
    python -m benchmarks.sweep --data ../shared/data --parts demo,shape --device cuda:0 --concurrency 1..256

Parts can be run alone (``--parts demo,resume,served,aiperf,shape``); figures are merged into
``benchmarks/results/sweep.json``, results and charts of sweeps go to ``benchmarks/results/sweep_*/``. ``served`` needs
nvidia-pytriton, ``aiperf`` AIPerf, ``shape`` (Qwen3-8B's shape, random weights) a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_file import RESULTS, write_result
from benchmarks.sweep_resume import resume_figures
from benchmarks.sweep_served import aiperf_figures, served_figures
from trtllm_dflash.bench.machine import machine_facts
from trtllm_dflash.bench.predict import held_out_errors, median_error
from trtllm_dflash.bench.sweep_configs import configurations_from_shorthands
from trtllm_dflash.bench.sweep_output import write_output
from trtllm_dflash.bench.sweep_plan import SweepPlan, parse_concurrencies
from trtllm_dflash.bench.sweep_results import make_results
from trtllm_dflash.bench.sweep_run import run_sweep
from trtllm_dflash.bench.workload import make_workload
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.build import build

PARTS = ("demo", "resume", "served", "aiperf", "shape")
KEPT = ("results.json", "results.csv", "pareto.svg")
Figures = tuple[dict[str, Any], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--v1-drafter", type=Path, help="the DFlash v1 drafter of the demo target, for its curve")
    parser.add_argument("--parts", default="demo,resume,served")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--repeats", type=int, help="runs per point, 3 or more for intervals  [default: 3, of the long shape sweep 1]"
    )
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--openai-url", help="endpoint for aiperf  [default: one that only sleeps]")
    parser.add_argument("--aiperf-command", default="aiperf")
    parser.add_argument("-o", "--output", type=Path, help="keep the sweep's whole output directory here")
    parser.add_argument("--dry-run", action="store_true", help="write no figures")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        bench = SweepBenchmark(arguments, Path(folder))
        for part in parts:
            started = time.perf_counter()
            figures, details = bench.part(part)
            details["seconds"] = round(time.perf_counter() - started, 1)
            print(f"{part}: {json.dumps(figures)}", flush=True)
            if not arguments.dry_run:
                print(
                    write_result("sweep", figures, shapes=bench.shapes, details={bench.key(part): details}), flush=True
                )


class SweepBenchmark:
    """The parts, on engines that are made when first needed."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._prompts = arguments.data / "gsm8k_test.jsonl"
        self._on_gpu = str(arguments.device).startswith("cuda")
        self._engines: dict[int, Path] = {}
        self.shapes = {"demo": "SmolLM2-135M-Instruct + DFlash 2 / DFlash drafter, block size 8, GSM8K prompts"}

    def key(self, part: str) -> str:
        """A part's name with its device where both devices have it."""
        return f"{part}_{'gpu' if self._on_gpu else 'cpu'}" if part == "demo" else part

    def part(self, name: str) -> Figures:
        """Run one part: (figures, details)."""
        arguments = self._arguments
        if name == "demo":
            return self._demo()
        if name == "resume":
            return resume_figures(self._demo_engines(2), self._prompts, self._folder / "resume", arguments.device)
        if name == "served":
            return served_figures(self._demo_engines(2), self._prompts, arguments.device, arguments.max_tokens)
        if name == "aiperf":
            return aiperf_figures(
                arguments.openai_url,
                self._prompts,
                self._demo_engines(2),
                command=arguments.aiperf_command,
                max_tokens=arguments.max_tokens,
            )
        from benchmarks.sweep_shape import FORCED_ACCEPTANCE, MAX_TOKENS, PROMPT_TOKENS, shape_sweep

        self.shapes["qwen3_8b"] = (
            f"36 layers, 4096/12288, 32/8 heads of 128, V 151,936, bfloat16; 5-layer DFlash 2 drafter; random weights, "
            f"forced acceptance {FORCED_ACCEPTANCE}; prompts of {PROMPT_TOKENS} random tokens, {MAX_TOKENS} of output"
        )
        plan_and_results = shape_sweep(
            self._demo_engines(2),
            self._folder / "shape",
            device=arguments.device,
            concurrencies=parse_concurrencies(arguments.concurrency),
            repeats=arguments.repeats or 1,
        )
        return self._figures("qwen3_8b", plan_and_results, self._folder / "shape")

    def _demo(self) -> Figures:
        arguments = self._arguments
        engines = [self._demo_engines(2)]
        words = ["plain", "dflash2"]
        if arguments.v1_drafter is not None:
            engines.append(self._demo_engines(1))
            words.insert(1, "dflash")
        if self._on_gpu:
            words.append("auto")
        plan = SweepPlan(
            tuple(configurations_from_shorthands(words, engines)),
            parse_concurrencies(arguments.concurrency),
            repeats=arguments.repeats or 3,
            requests_per_user=arguments.requests_per_user,
            # A request of this small model takes milliseconds on a GPU: few of them are no measurement.
            min_requests=32 if self._on_gpu else 8,
            device=arguments.device,
            max_open=1 if self._on_gpu else None,
        )
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
        workload = make_workload(self._prompts, params)
        output = arguments.output or self._folder / "demo"
        method, runs = run_sweep(plan, workload, output, progress=_tell)
        labels = [configuration.label for configuration in plan.configurations]
        document = make_results(runs, method, machine_facts(), labels=labels, command=_command())
        write_output(document, output)
        return self._figures("demo_gpu" if self._on_gpu else "demo_cpu", document, output)

    def _figures(self, name: str, document: dict[str, Any], output: Path) -> Figures:
        if not self._arguments.dry_run:
            kept = RESULTS / f"sweep_{name}"
            kept.mkdir(parents=True, exist_ok=True)
            for file in KEPT:
                shutil.copyfile(output / file, kept / file)
        labels = [configuration["label"] for configuration in document["configurations"]]
        errors = {label: held_out_errors(document, label) for label in labels}
        ending = "" if name == "demo_cpu" else f"_{name}"
        figures: dict[str, Any] = {
            f"prediction_median_err{ending}": median_error([error for each in errors.values() for error in each])
        }
        best = _best_speedup(document["points"], labels)
        if best is not None:
            figures[f"most_over_plain{ending}"] = best
        details = {
            "frontier": document["frontier"],
            "prediction_errors": errors,
            "points": [_short(point) for point in document["points"]],
            "warnings": document["warnings"],
        }
        return figures, details

    def _demo_engines(self, version: int) -> Path:
        if version not in self._engines:
            dtype = "bfloat16" if self._on_gpu else "float32"
            drafter = "demo" if version == 2 else str(self._arguments.v1_drafter)
            convert("demo", drafter, self._folder / f"checkpoint{version}", dtype=dtype)
            engines = self._folder / f"engines{version}"
            build(
                self._folder / f"checkpoint{version}",
                engines,
                max_batch_size=256 if self._on_gpu else 16,
                max_seq_len=1024,
            )
            self._engines[version] = engines
        return self._engines[version]


def _best_speedup(points: Sequence[dict[str, Any]], labels: Sequence[str]) -> float | None:
    """Largest ratio of a speculative point's tok/s per user to plain decoding's at the same concurrency."""
    plain = {p["concurrency"]: p["tok_s_user"]["mean"] for p in points if p["config"] == "plain"}
    ratios = [
        p["tok_s_user"]["mean"] / plain[p["concurrency"]]
        for p in points
        if p["config"] != "plain" and p["concurrency"] in plain
    ]
    return max(ratios, default=None)


def _short(point: dict[str, Any]) -> dict[str, Any]:
    names = ("tok_s_user", "tok_s_gpu")
    short = {name: point[name] for name in ("config", "concurrency", "frontier")}
    return short | {name: {key: value and round(value, 2) for key, value in point[name].items()} for name in names}


def _tell(label: str, done: int, total: int) -> None:
    print(f"[{done + 1}/{total}] {label}", flush=True)


def _command() -> str:
    import sys

    return " ".join(
        ["python -m benchmarks.sweep", *(Path(word).name if "/" in word else word for word in sys.argv[1:])]
    )


if __name__ == "__main__":
    main()

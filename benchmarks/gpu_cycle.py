"""The draft-verify cycle on a GPU: exactness, rooflines, host time, comparisons, memory.

    python -m benchmarks.gpu_cycle --data ../shared/data

Parts can be run alone (``--parts exact,speed,adaptive,shape,memory,fp8``); figures are merged into
``benchmarks/results/gpu_cycle.json``. ``--dry-run`` shrinks everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_demo import adaptive_figures, exactness_figures, fp8_accuracy_figures, speed_figures
from benchmarks.gpu_roofline import DeviceCeilings, measure_ceilings
from benchmarks.gpu_shape import FORCED_ACCEPTANCE, ShapeBench
from benchmarks.result_file import write_result
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.demo import demo_target
from trtllm_dflash.config.mapping import KvCacheDtype, QuantAlgo
from trtllm_dflash.engine.build import build

PARTS = ("exact", "speed", "adaptive", "shape", "memory", "fp8")
Figures = tuple[dict[str, Any], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer of the random pair  [default: the demo target's]")
    parser.add_argument("--dry-run", action="store_true", help="few prompts, few layers; nothing is written")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    run = GpuCycle(arguments.data / "gsm8k_test.jsonl", arguments.device, arguments.tokenizer, small=arguments.dry_run)
    for part in parts:
        started = time.perf_counter()
        figures, details = run.part(part)
        gc.collect()
        torch.cuda.empty_cache()
        details["seconds"] = round(time.perf_counter() - started, 1)
        print(f"{part}: {json.dumps(figures)}", flush=True)
        print(f"{part} details: {json.dumps(details)}", flush=True)
        if not arguments.dry_run:
            shapes = {
                "demo": "SmolLM2-135M-Instruct + DFlash 2 drafter, bfloat16, block size 8",
                "qwen3_8b": f"36 layers, 4096/12288, 32/8 heads of 128, V 151,936; 5-layer DFlash 2 drafter; random "
                f"weights, forced acceptance {FORCED_ACCEPTANCE}, context 1k",
            }
            print(write_result("gpu_cycle", figures, shapes=shapes, details={part: details}), flush=True)


class GpuCycle:
    """The parts; engines and ceilings are made when the first part needs them."""

    def __init__(self, prompts: Path, device: str, tokenizer: Path | None, *, small: bool) -> None:
        self._prompts = prompts
        self._device = device
        self._tokenizer = tokenizer
        self._small = small
        self._folder = tempfile.TemporaryDirectory()
        self._ceilings: DeviceCeilings | None = None

    def part(self, name: str) -> Figures:
        """Run one part."""
        runs: dict[str, Callable[[], Figures]] = {
            "exact": self._exact,
            "speed": self._speed,
            "adaptive": self._adaptive,
            "shape": self._shape,
            "memory": self._memory,
            "fp8": self._fp8,
        }
        return runs[name]()

    def _engines(self, dtype: str, quantization: QuantAlgo = "none") -> Path:
        root = Path(self._folder.name)
        engines = root / f"engines-{dtype}-{quantization}"
        if not engines.is_dir():
            checkpoint = root / f"checkpoint-{dtype}-{quantization}"
            cache: KvCacheDtype = "fp8" if quantization == "fp8" else "auto"
            convert("demo", "demo", checkpoint, dtype=dtype, quantization=quantization, kv_cache_dtype=cache)
            build(
                checkpoint,
                engines,
                backend="torch",
                max_batch_size=256,
                max_seq_len=1024,
                max_num_tokens=8192,
            )
        return engines

    def _exact(self) -> Figures:
        count, eager, tokens = (2, 1, 16) if self._small else (50, 10, 128)
        return exactness_figures(
            self._engines("bfloat16"),
            self._engines("float32"),
            self._prompts,
            count=count,
            eager_count=eager,
            max_tokens=tokens,
            device=self._device,
        )

    def _speed(self) -> Figures:
        # transformers' loop takes most of the time.
        count, tokens, repeats = (2, 16, 1) if self._small else (4, 128, 1)
        return speed_figures(
            self._engines("bfloat16"),
            self._prompts,
            count=count,
            max_tokens=tokens,
            repeats=repeats,
            device=self._device,
        )

    def _adaptive(self) -> Figures:
        concurrencies, tokens, repeats = ((1, 4), 16, 1) if self._small else ((1, 8, 32, 128, 256), 512, 7)
        return adaptive_figures(
            self._engines("bfloat16"),
            self._prompts,
            concurrencies=concurrencies,
            max_tokens=tokens,
            repeats=repeats,
            device=self._device,
        )

    def _bench(self, **arguments: Any) -> ShapeBench:
        device = torch.device(self._device)
        if self._ceilings is None:
            self._ceilings = measure_ceilings(device)
            print(self._ceilings, flush=True)
        return ShapeBench(
            self._tokenizer or demo_target(), device, self._ceilings, layers=5 if self._small else 36, **arguments
        )

    def _shape(self) -> Figures:
        bench = self._bench()
        cases: dict[str, Any] = {}
        for block_size, batches in ((16, (1, 8, 32, 64)), (8, (1,)), (1, (1, 32))):
            with bench.open(block_size) as llm:
                print(f"memory plan: {llm.memory.describe()}", flush=True)
                for batch in batches[:1] if self._small else batches:
                    case = bench.cycles(llm, batch)
                    cases[f"s{block_size}_b{batch}"] = case
                    print(json.dumps(case), flush=True)
                if block_size == 16:
                    stages = llm.profiler.stages(1, 16, context=1024)
                    cases["stages_ms_s16_b1"] = {name: seconds * 1e3 for name, seconds in stages.items()}
                    print(json.dumps(cases["stages_ms_s16_b1"]), flush=True)
        figures = {
            f"qwen3_8b_{key}_over_roofline": cases[case]["engine_over_roofline"]
            for key, case in (("s16_b1", "s16_b1"), ("s8_b1", "s8_b1"), ("s16_b32", "s16_b32"), ("plain_b1", "s1_b1"))
            if case in cases
        }
        for batch in (1, 64):
            if f"s16_b{batch}" in cases:
                figures[f"host_us_b{batch}"] = cases[f"s16_b{batch}"]["host_us"]
        ceilings = vars(self._ceilings) if self._ceilings is not None else {}
        return figures, {"cases": cases, "ceilings": ceilings}

    def _memory(self) -> Figures:
        """Free memory before and after, everything recorded; the plan was made before."""
        device = torch.device(self._device)
        torch.zeros(1, device=device)
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(device)
        bench = self._bench()
        gc.collect()
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(device)
        with bench.open(16) as llm:
            for batch in (1, 2) if self._small else (1, 4, 16, 64):
                bench.cycles(llm, batch)
            after, _ = torch.cuda.mem_get_info(device)
            planned, taken = llm.memory.total_bytes, before - after
            print(llm.memory.describe(), f"taken {taken / 2**20:.0f} MiB", flush=True)
        return {"memory_plan_rel_err": abs(planned - taken) / taken}, {"planned": planned, "taken": taken}

    def _fp8(self) -> Figures:
        """FP8 weights and cache of the target: cycles of the shape, accuracy of the demo pair."""
        bench = self._bench(quantization="fp8", target_cache_dtype=torch.float8_e4m3fn)
        cases = {}
        with bench.open(16) as llm:
            for batch in (1,) if self._small else (1, 32):
                cases[f"s16_b{batch}"] = bench.cycles(llm, batch)
                print(json.dumps(cases[f"s16_b{batch}"]), flush=True)
        accuracy, details = fp8_accuracy_figures(
            self._engines("bfloat16"),
            self._engines("bfloat16", "fp8"),
            self._prompts,
            count=2 if self._small else 50,
            max_tokens=16 if self._small else 128,
            device=self._device,
        )
        return accuracy | {
            "qwen3_8b_fp8_s16_b1_over_roofline": cases["s16_b1"]["engine_over_roofline"],
            "qwen3_8b_fp8_s16_b1_ms": cases["s16_b1"]["engine_ms"],
        }, details | {"cases": cases}


if __name__ == "__main__":
    main()

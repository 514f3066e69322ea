"""A sweep of Qwen3-8B's shape with random weights and forced acceptance: no directory holds such an engine.

Prompts are short and outputs long, about as in GSM8K and MT-bench, of which DFlash's public figures are: what is
compared is decoding, and long prompts with short outputs would measure prefill.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_shape import FORCED_ACCEPTANCE, dflash2_drafter, qwen3_8b
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.configuration import Configuration, Opened
from trtllm_dflash.bench.endpoints import InProcess
from trtllm_dflash.bench.machine import machine_facts
from trtllm_dflash.bench.sweep_output import write_output
from trtllm_dflash.bench.sweep_plan import SweepPlan
from trtllm_dflash.bench.sweep_results import make_results
from trtllm_dflash.bench.sweep_run import run_sweep
from trtllm_dflash.bench.workload import Workload, make_workload
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.random_weights import random_session
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.runtime.cycle_runner import EngineOptions

PROMPT_TOKENS, MAX_TOKENS = 128, 512
# Plain decoding of one request takes two seconds, and a run at least two or three requests one after the other: the
# first wave, the measured ones, and the load behind them. A whole pass takes about two minutes and a half.
REQUESTS_PER_USER, MIN_REQUESTS = 1, 2
BLOCK_SIZES = {"plain": 1, "S=16": 16}


def shape_sweep(
    engines: Path, folder: Path, *, device: str, concurrencies: Sequence[int], repeats: int, layers: int = 36
) -> dict[str, Any]:
    """Sweep plain decoding and block size 16; returns the results document, written to ``folder``.

    Args:
        engines: any engine directory, for its tokenizer. layers: fewer than 36 for a dry run.
    """
    target = qwen3_8b(layers)
    sessions: list[TorchSession] = []
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    workload = make_workload(
        None,
        params,
        count=1024,
        synthetic_prompt_tokens=PROMPT_TOKENS,
        # Ids that the borrowed tokenizer can turn into text.
        vocab_size=32768,
        forced_acceptance=FORCED_ACCEPTANCE,
    )

    def opener(
        configuration: Configuration,
        workload: Workload,
        *,
        device: str | None = None,
        max_prompt_tokens: int | None = None,
        concurrency: int | None = None,
    ) -> Opened:
        size = configuration.block_size or 1
        users = concurrency or 1
        limits = BuildLimits(users, 2048, 4096, 16, 32)
        # Weights are drawn once: closing an engine gives its caches back, and the next one is of the same shape.
        if not sessions:
            torch.manual_seed(0)
            where = torch.device(device or "cuda:0")
            sessions.append(random_session(target, dflash2_drafter(target), limits, device=where))
        session = sessions[0]
        session.limits = limits
        # All else is what a user's engine has: overlap and graphs wherever the device can.
        llm = LLM.of_session(
            session,
            engines / "tokenizer",
            speculation="on" if size > 1 else "off",
            block_size=size,
            kv_cache_tokens=users * (PROMPT_TOKENS + MAX_TOKENS + 64),
            prefix_cache=False,
            options=EngineOptions(forced_acceptance=min(FORCED_ACCEPTANCE, size) if size > 1 else None),
        )
        uuid = torch.cuda.get_device_properties(session.device).uuid if session.device.type == "cuda" else None
        facts: dict[str, object] = {
            "kind": "random weights",
            "backend": "torch",
            "device": session.device.type,
            "drafter_version": 2,
            "speculation": size > 1,
            "block_size": size,
            "dtype": target.dtype,
            "target_layers": layers,
            "max_batch_size": users,
            "kernels": "plugins" if session.uses_kernels else "torch",
        }
        return Opened(configuration, InProcess(llm), workload.prompts, 1, (f"GPU-{uuid}",) if uuid else (), facts, llm)

    def fingerprint(configuration: Configuration) -> str:
        return hashlib.sha256(f"qwen3_8b {layers} {configuration.block_size}".encode()).hexdigest()

    configurations = tuple(
        Configuration(label, engines=engines, speculation="on" if size > 1 else "off", block_size=size)
        for label, size in BLOCK_SIZES.items()
    )
    plan = SweepPlan(
        configurations,
        tuple(concurrencies),
        repeats=repeats,
        requests_per_user=REQUESTS_PER_USER,
        min_requests=MIN_REQUESTS,
        device=device,
        max_open=1,
    )

    def tell(label: str, done: int, total: int) -> None:
        print(f"[{done + 1}/{total}] {label}", flush=True)

    method, runs = run_sweep(plan, workload, folder, progress=tell, opener=opener, fingerprint_of=fingerprint)
    command = " ".join(["python -m benchmarks.sweep", *(Path(w).name if "/" in w else w for w in sys.argv[1:])])
    document = make_results(runs, method, machine_facts(), labels=list(BLOCK_SIZES), command=command)
    write_output(document, folder)
    return document

"""The same load in process and behind a real tritonserver, and by AIPerf and by our own client."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sweep_timed_server import FACTS, timed_server
from trtllm_dflash.bench.aiperf import run_aiperf
from trtllm_dflash.bench.configuration import Configuration, Opened, open_configuration
from trtllm_dflash.bench.load import Load, run_load
from trtllm_dflash.bench.measurement import Measurement, measure
from trtllm_dflash.bench.run import run_point
from trtllm_dflash.bench.served import find_served_model, open_endpoint
from trtllm_dflash.bench.workload import make_workload
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import triton_server

CONCURRENCY, REQUESTS, ROUNDS = 4, 24, 5


def served_figures(engines: Path, prompts: Path, device: str, max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``served_over_inprocess``: tok/s behind Triton over tok/s in process, median of interleaved rounds.

    Both engines are open all the time; the one that is not measured is idle.
    """
    workload = make_workload(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    load = Load(CONCURRENCY, None, REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        deploy(engines, Path(folder) / "models", device=device, prefix_cache=False)
        with triton_server(Path(folder) / "models", log=Path(folder) / "triton.log") as server:
            local = open_configuration(
                Configuration("in process", engines=engines), workload, device=device, concurrency=CONCURRENCY
            )
            try:
                remote = open_configuration(Configuration("served", url=server.http_url, tokenizer=engines), workload)
                rounds = [_round(local, remote, workload, load, reverse=bool(n % 2)) for n in range(ROUNDS)]
            finally:
                local.close()
    ratios = [there.tok_s / here.tok_s for here, there in rounds]
    figures = {"served_over_inprocess": statistics.median(ratios)}
    details = {
        "concurrency": CONCURRENCY,
        "requests": REQUESTS,
        "max_tokens": max_tokens,
        "ratios": ratios,
        "in_process_tok_s": [here.tok_s for here, _ in rounds],
        "served_tok_s": [there.tok_s for _, there in rounds],
        "outputs_identical": all(here.outputs_sha256 == there.outputs_sha256 for here, there in rounds),
    }
    return figures, details


def aiperf_figures(
    url: str | None, prompts: Path, tokenizer: Path, *, command: str, max_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``aiperf_rel_diff``: AIPerf's tok/s of an OpenAI endpoint over ours, less 1; median of interleaved rounds.

    Args:
        url: the endpoint. None takes one that only sleeps: AIPerf's own processes slow down an engine that shares their
            cores, and then the difference is not one of method.
    """
    if url is None:
        with timed_server() as timed:
            figures, details = aiperf_figures(timed, prompts, tokenizer, command=command, max_tokens=max_tokens)
        return figures, details | {"endpoint": FACTS}
    workload = make_workload(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0), count=2 * REQUESTS)
    served = find_served_model(url, api="openai")
    load = Load(CONCURRENCY, None, REQUESTS)
    pairs = []
    for number in range(ROUNDS):
        pair: dict[str, Measurement] = {}
        for who in ("ours", "aiperf") if number % 2 else ("aiperf", "ours"):
            result = (
                run_load(open_endpoint(served), workload.prompts, workload.params, load)
                if who == "ours"
                else run_aiperf(served, workload.prompts, workload.params, load, tokenizer=tokenizer, command=command)
            )
            pair[who] = measure(result)
        pairs.append(pair)
    differences = [pair["aiperf"].tok_s / pair["ours"].tok_s - 1 for pair in pairs]
    details = {
        "concurrency": CONCURRENCY,
        "requests": REQUESTS,
        "differences": differences,
        "aiperf_tok_s": [pair["aiperf"].tok_s for pair in pairs],
        "our_tok_s": [pair["ours"].tok_s for pair in pairs],
    }
    return {"aiperf_rel_diff": abs(statistics.median(differences))}, details


def _round(
    local: Opened, remote: Opened, workload: Any, load: Load, *, reverse: bool
) -> tuple[Measurement, Measurement]:
    if reverse:
        there = run_point(remote, workload, load)
        return run_point(local, workload, load), there
    here = run_point(local, workload, load)
    return here, run_point(remote, workload, load)

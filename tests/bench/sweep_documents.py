"""Results documents whose figures follow from a known model, for tests of what is made of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_dflash.bench.sweep_journal import RunRecord
from trtllm_dflash.bench.sweep_plan import PointKey
from trtllm_dflash.bench.sweep_results import make_results

WORKLOAD = {
    "dataset": "questions.jsonl",
    "prompts": 1000,
    "prompts_sha256": "ab" * 32,
    "chat_template": True,
    "sampling": {"temperature": 0.0, "max_tokens": 65},
    "forced_acceptance_length": None,
}
METHOD = {"workload": WORKLOAD, "requests_per_user": 4, "min_requests": 8, "device": "cpu"}
MACHINE = {"system": "Linux", "processor": "a processor", "gpus": [], "versions": {"python": "3.11"}}


def result(
    tok_s: float,
    tok_s_user: float,
    *,
    ttft_ms: float = 20.0,
    gpus: int = 1,
    histogram: Sequence[int] | None = None,
    tokens: float = 65.0,
) -> dict[str, Any]:
    """The JSON of one run's measurement."""
    spread = {"mean": ttft_ms, "p50": ttft_ms, "p95": ttft_ms, "p99": ttft_ms, "count": 8}
    acceptance = None
    if histogram is not None:
        cycles, accepted = sum(histogram), sum(kept * count for kept, count in enumerate(histogram))
        acceptance = {
            "acceptance_length": 1 + accepted / cycles,
            "acceptance_length_per_request": 1 + accepted / cycles,
            "cycles": cycles,
            "accepted": accepted,
            "drafted": None,
            "histogram": list(histogram),
            "per_position": [sum(histogram[k:]) / cycles for k in range(1, len(histogram))],
        }
    return {
        "requests": 8, "errors": 0, "window_s": 1.0, "tok_s": tok_s, "tok_s_user": tok_s_user,
        "tok_s_gpu": tok_s / gpus, "requests_s": 1.0, "gpus": gpus, "ttft_ms": spread, "itl_ms": spread,
        "tpot_ms": spread, "e2e_ms": spread, "prompt_tokens": 100.0, "completion_tokens": tokens, "in_flight": 1.0,
        "acceptance": acceptance, "joules": None, "joules_per_token": None, "outputs_sha256": "cd" * 32,
        "first_error": None,
    }  # fmt: skip


def run(label: str, concurrency: int, repeat: int, figures: dict[str, Any], **facts: Any) -> RunRecord:
    """A finished run."""
    known = {"device": "cpu", "speculation": label != "plain", "block_size": 1 if label == "plain" else 4}
    return RunRecord(
        key=PointKey(repeat, concurrency, label),
        fingerprint="ef" * 32,
        facts={**known, "max_batch_size": 64, "target_layers": 10, **facts},
        result=figures,
        probe={"probe_ms": 10.0, "load_average": 0.5},
        at="2026-01-01T00:00:00+00:00",
    )


def document(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Results of these runs."""
    labels = list(dict.fromkeys(one.key.label for one in runs))
    return make_results(runs, METHOD, MACHINE, labels=labels, command="trtllm-dflash sweep")

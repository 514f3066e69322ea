"""The version 1 demo drafter, which the project does not embed: emitted networks of both lowerings, and its plans.

Named by ``TRTLLM_DFLASH_V1_DRAFTER``, or found in ``../shared/models`` beside the project; skips where it is absent.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorrt_requests import request_of
from test_generation_through_networks import generate, lowered
from test_native_networks import check, observe

from trtllm_dflash import SamplingParams
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.plan_build import read_plan_facts
from trtllm_dflash.engine.plan_facts import PlanFacts
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

NAMED = os.environ.get("TRTLLM_DFLASH_V1_DRAFTER")
DRAFTER = Path(NAMED) if NAMED else Path(__file__).parents[3] / "shared" / "models" / "smollm2-135m-dflash"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, rtx: TensorRTLibrary) -> Path:
    """A folder with the pair as ``float32`` and ``bfloat16``, and the torch engine ``engines``."""
    if not DRAFTER.is_dir():
        pytest.skip(f"{DRAFTER} is not there; set TRTLLM_DFLASH_V1_DRAFTER to a version 1 drafter of the demo target")
    root = tmp_path_factory.mktemp("version-1")
    try:
        for dtype in ("float32", "bfloat16"):
            convert("demo", str(DRAFTER), root / dtype, dtype=dtype)
    except CheckpointError as problem:
        pytest.skip(f"the demo target is not available: {problem}")
    build(root / "float32", root / "engines", backend="torch", max_seq_len=128)
    return root


@pytest.mark.parametrize("lowering", ["native", "plugin"])
def test_networks_equal_the_torch_dialect(checkpoints: Path, rtx: TensorRTLibrary, lowering: str) -> None:
    request = lowered(request_of(rtx, checkpoints / "float32"), lowering, seq_len=120)
    assert request.drafter_facts.version == 1
    check(*observe(request, 0))


@pytest.mark.parametrize("lowering", ["native", "plugin"])
def test_32_greedy_tokens(
    checkpoints: Path, rtx: TensorRTLibrary, monkeypatch: pytest.MonkeyPatch, lowering: str
) -> None:
    request = lowered(request_of(rtx, checkpoints / "float32"), lowering, batch=2, seq_len=128)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    prompts = ["What is the capital of France?"]
    expected = generate(checkpoints / "engines", prompts, params, monkeypatch)
    found = generate(checkpoints / "engines", prompts, params, monkeypatch, request)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [o.metrics.accepted_histogram for o in found] == [o.metrics.accepted_histogram for o in expected]


def test_plans(checkpoints: Path, tmp_path: Path) -> None:
    report = build(checkpoints / "bfloat16", tmp_path / "engines", backend="tensorrt-rtx", max_seq_len=512)
    assert report.tensorrt is not None
    draft: PlanFacts = read_plan_facts(tmp_path / "engines", "draft", 0)
    assert {entry.name for entry in draft.layers} >= {"attention_output", "topk", "cumulative"}
    assert report.plan_bytes > 10e6

"""Selfcheck with the torch backend in TensorRT's place, right and wrong."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trtllm_dflash.bench import selfcheck
from trtllm_dflash.bench.selfcheck import PROMPTS, SUBJECTS, Subject, run_selfcheck
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.errors import BuildError

# Named options make selfcheck build it apart from the reference.
STAND_IN = Subject("stand-in", "torch", "float32", {"block_size": 8}, kernels="torch", needs_gpu=False)


@pytest.fixture(scope="module")
def checkpoint_of(tiny_pairs: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(dtype: str) -> Path:
        if dtype not in made:
            pair = tiny_pairs("llama-v2")
            made[dtype] = tmp_path_factory.mktemp(dtype) / "checkpoint"
            convert(str(pair.target), str(pair.drafter), made[dtype], dtype=dtype)
        return made[dtype]

    return checkpoint


@pytest.fixture(autouse=True)
def limits_of_the_tiny_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "LIMITS", {"max_batch_size": 8, "max_seq_len": 256, "max_num_tokens": 512})


def _check(checkpoint_of: Callable[[str], Path], folder: Path, *subjects: Subject) -> dict[str, Any]:
    return run_selfcheck(checkpoint_of, folder, subjects=subjects, device="cpu", max_tokens=8)


def _stand_in(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Subject:
    size = json.loads((checkpoint_of("float32") / "config.json").read_text())["pairing"]["block_size"]
    return replace(STAND_IN, build_options={"block_size": size})


def test_a_right_backend_passes(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    document = _check(checkpoint_of, tmp_path, _stand_in(checkpoint_of, tmp_path))
    reference, found = document["checks"]
    assert (document["verdict"], reference["status"], found["status"]) == ("passed", "passed", "passed")
    assert set(found["passes"]) == set(selfcheck.COMPARED)
    assert all(figures["error"] == 0 for figures in found["passes"].values())
    assert found["tokens_speculation"]["identical"] == found["tokens_plain"]["identical"] == len(PROMPTS)
    assert found["acceptance_length"] == found["acceptance_length_reference"]
    assert found["equal_drafts"] == 1.0
    assert set(found["speed"]) == set(found["speed_reference"])
    assert found["not_compared"] == []


def test_bfloat16_is_judged_by_what_torch_loses_in_bfloat16(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    subject = replace(_stand_in(checkpoint_of, tmp_path), dtype="bfloat16")
    (_, found) = _check(checkpoint_of, tmp_path, subject)["checks"]
    assert found["status"] == "passed", found
    figures = found["passes"]["verify_logits"]
    assert 0 < figures["error"] < figures["allowed"]


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_backend_that_computes_something_else_fails(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The stand-in's session loses the sign of what one network writes or gives, as a wrong layer would."""

    def broken(path: Path, **arguments: Any) -> Any:
        session = load_session(path, **arguments)
        if not path.name.startswith("torch-float32-"):
            return session
        if part == "target":
            real = session.target
            session.target = lambda inputs: replace(real(inputs), logits=-real(inputs).logits)  # type: ignore
        else:
            real_inject = session.inject
            session.inject = lambda features, *rest, **named: real_inject(-features, *rest, **named)  # type: ignore
        return session

    monkeypatch.setattr(selfcheck, "load_session", broken)
    (_, found) = _check(checkpoint_of, tmp_path, _stand_in(checkpoint_of, tmp_path))["checks"]
    assert found["status"] == "failed"
    assert ("logits" if part == "target" else "drafter_cache") in found["why"]


def test_a_backend_that_gives_nan_fails(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = selfcheck.run_passes

    def nan(session: Any, prompts: Any, given: Any = None) -> Any:
        passes = real(session, prompts, given)
        return (
            passes if given is None else replace(passes, verify_logits=torch.full_like(passes.verify_logits, torch.nan))
        )

    monkeypatch.setattr(selfcheck, "run_passes", nan)
    (_, found) = _check(checkpoint_of, tmp_path, _stand_in(checkpoint_of, tmp_path))["checks"]
    assert found["status"] == "failed"
    assert "verify_logits is off by nan" in found["why"]


def test_a_failed_build_is_a_result_without_paths_or_host(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoint: Path, output: Path, **options: Any) -> Any:
        if options["backend"] == "tensorrt":
            raise BuildError(f"{output}/target/rank0.engine on {platform.node()}: no kernel")
        return real(checkpoint, output, **options)

    real = selfcheck.build
    monkeypatch.setattr(selfcheck, "build", fail)
    document = _check(checkpoint_of, tmp_path, Subject("broken", "tensorrt", "float32", needs_gpu=False))
    (_, found) = document["checks"]
    assert found["status"] == document["verdict"] == "failed"
    assert "BuildError" in found["why"]
    assert "no kernel" in found["why"]
    text = json.dumps(document)
    assert str(tmp_path) not in text
    assert platform.node() not in text


def test_what_is_not_there_is_said_and_no_failure(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Subject("nowhere", "tensorrt", "float32", needs="a_package_that_is_not_there")
    plugins = Subject("plugins", "torch", "bfloat16", needs_gpu=False, needs_plugins=True)
    monkeypatch.setattr(selfcheck, "find_library", lambda: None)
    document = _check(checkpoint_of, tmp_path, nowhere, Subject("gpu", "torch", "bfloat16"), plugins)
    assert [one["status"] for one in document["checks"]] == ["passed", "skipped", "skipped", "skipped"]
    assert "plugin library is not built" in document["checks"][3]["why"]
    assert "a_package_that_is_not_there is not installed" in document["checks"][1]["why"]
    assert "needs a CUDA GPU" in document["checks"][2]["why"]
    assert (document["verdict"], document["skipped"]) == ("passed", 3)


def test_the_document_has_no_prompts(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    text = json.dumps(_check(checkpoint_of, tmp_path))
    assert not any(prompt in text for prompt in PROMPTS)


def test_every_backend_has_a_subject() -> None:
    assert {subject.backend for subject in SUBJECTS} == {"torch", "tensorrt", "tensorrt-rtx"}

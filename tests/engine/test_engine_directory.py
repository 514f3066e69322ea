"""The engine directory: what is damaged, wrong or half-written is refused by name and never run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import DrafterRecipe, write_drafter

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.build_estimate import estimate_build
from trtllm_dflash.engine.directory import load_session, open_engine_directory
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.errors import BuildError, CheckpointError, ConfigError, DFlashError, EngineError

LIMITS = {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 32}


@pytest.fixture
def engines(tiny_checkpoints: Callable, tmp_path: Path) -> Path:
    """A fresh engine directory of its own."""
    build(tiny_checkpoints("llama-v2"), tmp_path / "engines", backend="torch", **LIMITS)
    return tmp_path / "engines"


def test_what_was_built_is_what_is_opened(engines: Path, tiny_checkpoints: Callable) -> None:
    opened = open_engine_directory(engines)
    assert (opened.backend, opened.tp_size) == ("torch", 1)
    assert (opened.limits.max_batch_size, opened.limits.max_seq_len, opened.limits.max_num_tokens) == (4, 128, 32)
    assert opened.limits.block_size == 6
    assert opened.target_config.family == "llama"
    assert opened.drafter_config is not None
    assert opened.drafter_config.target_layer_ids == (2, 0, 3)
    listed = {path.relative_to(engines).as_posix() for path in engines.rglob("*") if path.is_file()}
    assert listed == {"config.json", *opened.files}
    for model in ("target", "drafter"):
        config = json.loads((engines / model / "config.json").read_text())
        assert config["build_config"]["max_seq_len"] == 128
        assert config["build_config"]["max_draft_len"] == 5
        assert config["pretrained_config"]["hidden_size"] == 64


def test_session_outlives_a_rebuild(engines: Path, tiny_checkpoints: Callable) -> None:
    """Replacing the directory does not pull the weights from under who has it open."""
    session = load_session(engines, device="cpu")
    build(tiny_checkpoints("llama-v2"), engines, backend="torch", force=True, **LIMITS)
    session.allocate_caches(2)
    assert session.cache_bytes_per_page() > 0
    load_session(engines, device="cpu")


@pytest.mark.fault("corrupt engine file")
@pytest.mark.parametrize("name", ["target/rank0.safetensors", "drafter/rank0.safetensors", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damaged_file_is_named(engines: Path, name: str, damage: str) -> None:
    path = engines / name
    content = bytearray(path.read_bytes())
    # A hard link shares its bytes with the checkpoint: replace, never write through.
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-100])
    elif damage == "changed":
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_session(engines, device="cpu")
    assert str(path) in str(caught.value)
    assert {"missing": "no such file"}.get(damage, damage) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kind", "checkpoint", '"engine"'),
        ("format_version", 99, "1"),
        ("backend", "onnx", "torch, tensorrt or tensorrt-rtx"),
        ("tp_size", 0, "1"),
        ("limits", None, "limits"),
    ],
    ids=str,
)
def test_wrong_root_config_names_file_and_key(engines: Path, key: str, value: Any, expected: str) -> None:
    file = engines / "config.json"
    config = json.loads(file.read_text())
    config[key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        open_engine_directory(engines)
    assert str(file) in str(caught.value)
    assert f"'{key}'" in str(caught.value)
    assert expected in str(caught.value)


def test_broken_root_config(engines: Path) -> None:
    (engines / "config.json").write_text('{"kind": "engi')
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_engine_directory(engines)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is not an engine directory"):
        open_engine_directory(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        open_engine_directory(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 0}, "--max-batch-size 0: expected 1 to 4096"),
        ({"max_seq_len": 1}, "--max-seq-len 1: expected 2 to 512 .*trained length"),
        ({"max_seq_len": 513}, "--max-seq-len 513: expected 2 to 512 .*trained length"),
        ({"max_num_tokens": 0}, "--max-num-tokens 0: expected 1"),
        ({"block_size": 7}, "--block-size 7: expected 2 to 6 .*trained block size"),
        ({"block_size": 1}, "--block-size 1: expected 2 to 6"),
        ({"backend": "onnx"}, "backend 'onnx': expected auto, torch"),
    ],
    ids=str,
)
def test_limits_out_of_range(tiny_checkpoints: Callable, tmp_path: Path, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny_checkpoints("llama-v2"), tmp_path / "engines", **({"backend": "torch"} | limits))
    assert list(tmp_path.iterdir()) == []


def test_sequences_are_no_longer_than_the_drafter_was_trained_for(tiny_pairs: Callable, tmp_path: Path) -> None:
    """Its rotations beyond are made up, and only the acceptance length would tell."""
    pair = tiny_pairs("llama-v2")
    write_drafter(tmp_path / "drafter", DrafterRecipe(top_level={"max_position_embeddings": 96}), pair.model)
    convert(str(pair.target), str(tmp_path / "drafter"), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="--max-seq-len 97: expected 2 to 96"):
        build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch", max_seq_len=97)
    assert build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch").limits.max_seq_len == 96


def test_target_alone(tiny_pairs: Callable, tmp_path: Path) -> None:
    convert(str(tiny_pairs("llama-v2").target), None, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch")
    opened = open_engine_directory(tmp_path / "engines")
    assert opened.drafter_config is None
    assert opened.limits.block_size == 1
    assert not (tmp_path / "engines" / "drafter").exists()
    with pytest.raises(ConfigError, match="--block-size 4: this checkpoint has no drafter"):
        build(tmp_path / "checkpoint", tmp_path / "other", backend="torch", block_size=4)


def test_ranks_that_the_torch_backend_cannot_run(tiny_pairs: Callable, tmp_path: Path) -> None:
    pair = tiny_pairs("llama-v2")
    convert(str(pair.target), str(pair.drafter), tmp_path / "checkpoint", tp_size=2)
    with pytest.raises(BuildError, match="converted for 2 ranks; the torch backend runs one"):
        build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch")


def test_an_fp8_cache_is_built_and_runs_in_the_compute_dtype_on_a_cpu(
    tiny_pairs: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair, engines = tiny_pairs("llama-v2"), tmp_path / "engines"
    convert(str(pair.target), str(pair.drafter), tmp_path / "checkpoint", kv_cache_dtype="fp8")
    build(tmp_path / "checkpoint", engines, backend="torch", **LIMITS)
    opened = open_engine_directory(engines)
    assert opened.quantization.kv_cache_dtype == "fp8"
    session = load_session(engines, device="cpu")
    session.allocate_caches(1)
    assert isinstance(session, TorchSession)
    assert {cache.k.dtype for cache in session.target_caches} == {torch.float32}
    assert "the KV cache is float32 here: an fp8 cache needs the CUDA kernels" in caplog.text


def test_the_estimate_counts_one_byte_per_number_of_an_fp8_cache(tiny_pairs: Callable, tmp_path: Path) -> None:
    pair = tiny_pairs("llama-v2")
    estimates = []
    for dtype in ("auto", "fp8"):
        convert(str(pair.target), str(pair.drafter), tmp_path / dtype, kv_cache_dtype=dtype)
        estimates.append(estimate_build(tmp_path / dtype, backend="torch", **LIMITS))
    plain, small = estimates
    assert small.target_cache_mb == plain.target_cache_mb / 4
    assert small.drafter_cache_mb == plain.drafter_cache_mb


@pytest.mark.parametrize("backend", ["torch", "tensorrt", "tensorrt-rtx"])
def test_an_engine_of_several_ranks_does_not_load(engines: Path, backend: str) -> None:
    """One rank of it would answer with a part of the sums, and ranks that draw on their own would drift apart."""
    file = engines / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"backend": backend, "tp_size": 2}))
    with pytest.raises(ConfigError, match="built for 2 ranks") as caught:
        load_session(engines, device="cpu")
    assert "--tp-size 1" in (caught.value.hint or "")


def test_damaged_checkpoint_is_not_built(tiny_checkpoints: Callable, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoints("llama-v2"), tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "target" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors: truncated"):
        build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_engine_directory_is_not_a_checkpoint(engines: Path, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match="kind"):
        build(engines, tmp_path / "other", backend="torch")


@pytest.mark.parametrize("device", ["npu", "cuda:x", "", "mps"])
def test_unknown_device(engines: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="expected cpu or cuda:N"):
        load_session(engines, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(engines: Path) -> None:
    with pytest.raises(EngineError, match="device 'cuda:0': no CUDA GPU is available") as caught:
        load_session(engines, device="cuda:0")
    assert "doctor" in (caught.value.hint or "")


SLOW_BUILD = """
    import sys, time
    from trtllm_dflash.engine import build as module

    original = module.hash_directory

    def slow(*args, **kwargs):
        # Everything is written by now except the root config.json.
        print("written", flush=True)
        time.sleep(60)
        return original(*args, **kwargs)

    module.hash_directory = slow
    module.build(sys.argv[1], sys.argv[2], backend="torch", force=True)
"""


@pytest.mark.parametrize("existing", [False, True], ids=["fresh", "over an old one"])
def test_killed_build_leaves_the_old_directory_or_none(
    tiny_checkpoints: Callable, tmp_path: Path, existing: bool
) -> None:
    checkpoint, output = tiny_checkpoints("llama-v2"), tmp_path / "engines"
    if existing:
        build(checkpoint, output, backend="torch", max_seq_len=64)
    command = [sys.executable, "-c", textwrap.dedent(SLOW_BUILD), str(checkpoint), str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    if existing:
        assert open_engine_directory(output).limits.max_seq_len == 64
    else:
        assert not output.exists()
    # Running it again succeeds and removes what the dead run left.
    build(checkpoint, output, backend="torch", max_seq_len=128, force=True)
    assert open_engine_directory(output).limits.max_seq_len == 128
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]


def test_existing_output_needs_force(engines: Path, tiny_checkpoints: Callable) -> None:
    before = (engines / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        build(tiny_checkpoints("llama-v2"), engines, backend="torch")
    assert (engines / "config.json").read_bytes() == before

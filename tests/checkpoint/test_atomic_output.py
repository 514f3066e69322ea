"""Output directories appear whole or not at all, and verification finds every damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.checkpoint.atomic_directory import atomic_directory
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.manifest import hash_directory
from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.engine.build import build
from trtllm_dflash.errors import CheckpointError, ConfigError, DFlashError

# Runs convert once per stage in a forked child that kills itself there with SIGKILL. One interpreter for all stages,
# because importing torch takes longer than everything else here.
KILLER = """
import json, os, signal, sys
from pathlib import Path
from trtllm_dflash.checkpoint import atomic_directory as atomic
from trtllm_dflash.checkpoint.manifest import hash_directory
from trtllm_dflash.checkpoint.convert import convert

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(module, name, after):
    original = getattr(module, name)
    def replacement(*arguments):
        result = original(*arguments) if after else None
        die()
    setattr(module, name, replacement)

def run(stage, target, output):
    calls = [0]
    def progress(label, done, total):
        calls[0] += 1
        if stage == f"tensor {calls[0]}" or (stage == "last tensor" and done == total):
            die()
    if stage == "before flush":
        die_at(atomic, "_flush_tree", False)
    if stage == "before move":
        die_at(atomic, "_move_into_place", False)
    if stage == "after exchange":
        die_at(atomic, "_exchange", True)
    if stage == "after move":
        die_at(atomic, "_move_into_place", True)
    convert(target, None, Path(output), force=True, progress=progress)

target, output, *stages = sys.argv[1:]
for stage in stages:
    child = os.fork()
    if child == 0:
        run(stage, target, output)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "finished"
    content = hash_directory(Path(output), exclude=()) if Path(output).is_dir() else None
    print(json.dumps([stage, ended, content and {name: record.sha256 for name, record in content.items()}]))
"""
STAGES = ["tensor 1", "tensor 5", "last tensor", "before flush", "before move"]


def run_killer(target: Path, output: Path, stages: list[str]) -> list[Any]:
    """Per stage: its name, how the child ended, and what the output directory then holds (name → hash)."""
    command = [sys.executable, "-c", KILLER, str(target), str(output), *stages]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [json.loads(line) for line in result.stdout.splitlines()]


def content(directory: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in hash_directory(directory, exclude=()).items()}


def partial_siblings(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if ".partial-" in path.name]


def test_killed_before_anything_was_there(tmp_path: Path, target: Path) -> None:
    """Kill -9 at every stage leaves no directory; the next run works and clears up."""
    output = tmp_path / "work" / "out"
    assert run_killer(target, output, STAGES) == [[stage, "signal 9", None] for stage in STAGES]
    # Each run removes what the one before left.
    assert len(partial_siblings(output.parent)) == 1
    convert(str(target), None, output)
    open_checkpoint(output).verify()
    assert partial_siblings(output.parent) == []


def test_killed_while_replacing(tmp_path: Path, target: Path) -> None:
    """The old directory stays whole until the new one is, with no moment in between."""
    output = tmp_path / "out"
    convert(str(target), None, output)
    new = content(output)
    # The old directory is told from the new one by a file that the new one will not have.
    (output / "old").touch()
    old = content(output)
    stages = [*STAGES, "after exchange"]
    results = run_killer(target, output, stages)
    assert results == [[stage, "signal 9", new if stage == "after exchange" else old] for stage in stages]


def test_exception_leaves_the_old_directory(tmp_path: Path, target: Path) -> None:
    convert(str(target), None, tmp_path / "out")
    before = content(tmp_path / "out")

    def interrupt(label: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(target), None, tmp_path / "out", force=True, progress=interrupt)
    assert content(tmp_path / "out") == before
    assert partial_siblings(tmp_path) == []


def test_existing_output_needs_force(tmp_path: Path, target: Path) -> None:
    convert(str(target), None, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists") as caught:
        convert(str(target), None, tmp_path / "out")
    assert caught.value.hint == "pass --force to replace it"
    convert(str(target), None, tmp_path / "out", force=True)


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_foreign_directories_are_never_replaced(tmp_path: Path, target: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="is not what this command writes"):
        convert(str(target), None, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / name).exists()


def test_a_checkpoint_is_never_replaced_by_engines(tmp_path: Path, target: Path) -> None:
    """``build -c X -o X --force`` would destroy its own input, hours of conversion."""
    convert(str(target), None, tmp_path / "checkpoint")
    before = content(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="is not what this command writes"):
        build(tmp_path / "checkpoint", tmp_path / "checkpoint", backend="torch", force=True)
    assert content(tmp_path / "checkpoint") == before
    build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch")
    with pytest.raises(CheckpointError, match="is not what this command writes"):
        convert(str(target), None, tmp_path / "engines", force=True)


def test_file_or_link_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="exists and is not a directory"), atomic_directory(tmp_path / name):
            pass


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"file/deep/out: cannot be written: Not a directory"),
        atomic_directory(tmp_path / "file" / "deep" / "out"),
    ):
        pass


def test_full_disk(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the first byte where it can be known, and as an error of ours where it cannot."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(CheckpointError, match=r"0 MB are free, the checkpoint needs \d MB"):
        convert(str(target), None, tmp_path / "out")
    with (
        pytest.raises(CheckpointError, match="out: cannot be written: No space left on device"),
        atomic_directory(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not (tmp_path / "out").exists()
    assert partial_siblings(tmp_path) == []


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "file").write_text("x")
        assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Neither removes the other's unfinished directory; the second to finish finds the first one's."""

    def write_both() -> None:
        with atomic_directory(tmp_path / "out") as first:
            (first / "file").write_text("first")
            with atomic_directory(tmp_path / "out") as second:
                (second / "file").write_text("second")
                assert first.is_dir()

    with pytest.raises(CheckpointError, match="not what this command writes"):
        write_both()
    assert (tmp_path / "out" / "file").read_text() == "second"


@pytest.mark.parametrize(
    ("file", "damage", "words", "found_by_open"),
    [
        ("target/rank0.safetensors", "truncate", "truncated", True),
        ("target/rank0.safetensors", "flip", "changed: found SHA-256", False),
        ("drafter/rank0.safetensors", "remove", "no such file", True),
        ("tokenizer/tokenizer.json", "append", "changed: found", True),
        ("target/config.json", "flip", "changed: found SHA-256", False),
    ],
)
def test_damage_is_found(
    tmp_path: Path, target: Path, drafter: Path, file: str, damage: str, words: str, found_by_open: bool
) -> None:
    """Sizes when opened, contents when verified; the file is named."""
    convert(str(target), str(drafter), tmp_path / "out")
    path = tmp_path / "out" / file
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "append":
        path.write_bytes(data + b" ")
    else:
        # A space of the header's padding or of the indentation: still readable, not the same.
        place = data.index(b"  ")
        path.write_bytes(data[:place] + b"\t" + data[place + 1 :] if file.endswith("json") else _flip_last_bit(data))
    if found_by_open:
        with pytest.raises(CheckpointError, match=f"{file}: {words}"):
            open_checkpoint(tmp_path / "out")
        return
    checkpoint = open_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"{file}: {words}"):
        checkpoint.verify()


def _flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_verify_reports_progress(tmp_path: Path, target: Path) -> None:
    convert(str(target), None, tmp_path / "out")
    calls: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(tmp_path / "out")
    checkpoint.verify(lambda done, total: calls.append((done, total)))
    total = sum(record.bytes for record in checkpoint.files.values())
    assert calls[-1] == (total, total)
    assert len(calls) == len(checkpoint.files)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 2}, "format_version': found 2, expected 1"),
        ({"kind": "engine"}, 'kind\': found "engine", expected "checkpoint"'),
        ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "expected a path inside the directory"),
        ({"pairing": {"block_size": 4}}, "pairing"),
    ],
)
def test_root_config_that_is_not_ours(
    tmp_path: Path, target: Path, drafter: Path, change: dict[str, object], words: str
) -> None:
    convert(str(target), str(drafter), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DFlashError, match=words):
        open_checkpoint(tmp_path / "out")


def test_not_a_checkpoint_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="it is not a checkpoint directory"):
        open_checkpoint(tmp_path)

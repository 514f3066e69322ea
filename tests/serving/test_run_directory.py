"""Folders of killed servers are removed at the next start, those of living ones never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_dflash.serving.run_directory import PREFIX, RunDirectory, remove_abandoned

OWNER = """
import subprocess, sys
from trtllm_dflash.serving.run_directory import RunDirectory
run = RunDirectory()
(run.path / "backends").mkdir()
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "60"], pass_fds=[run.lock], **quiet) if "child" in sys.argv else None
print(run.path, run.shm_prefix, child.pid if child else 0, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go, here and in processes that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class _Owner:
    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-c", OWNER, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        path, self.shm_prefix, child = self.process.stdout.readline().split()
        self.path, self.child = Path(path), int(child)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[_Owner]:
    owner = _Owner(*getattr(request, "param", ()))
    yield owner
    owner.kill()


def test_the_folder_of_a_killed_owner_is_removed_with_its_shared_memory(owner: _Owner) -> None:
    region = Path("/dev/shm", f"{owner.shm_prefix}region")
    region.touch()
    assert remove_abandoned() == []
    assert owner.path.is_dir()
    owner.kill()
    assert remove_abandoned() == [owner.path]
    assert not owner.path.exists()
    assert not region.exists()


@pytest.mark.parametrize("owner", [("child",)], indirect=True)
def test_a_server_that_outlives_its_owner_keeps_its_folder(owner: _Owner) -> None:
    owner.kill()
    assert remove_abandoned() == []
    os.kill(owner.child, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not remove_abandoned() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not owner.path.exists()


def test_a_new_folder_is_not_taken_for_abandoned_and_removes_what_is(owner: _Owner) -> None:
    owner.kill()
    first = RunDirectory()
    second = RunDirectory()
    try:
        assert not owner.path.exists()
        assert first.path.is_dir()
        assert second.path.is_dir()
    finally:
        first.remove()
        second.remove()
    assert not first.path.exists()
    first.remove()  # again: nothing happens


def test_what_is_not_a_finished_folder_of_ours_stays(folder: Path) -> None:
    being_made = folder / f"{PREFIX}made"
    being_made.mkdir()
    locked_next = folder / f"{PREFIX}locked"
    locked_next.mkdir()
    (locked_next / "lock").touch()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("dflash_1_00000000_")
    (folder / f"{PREFIX}link").symlink_to(elsewhere)
    (folder / f"{PREFIX}file").touch()
    before = sorted(folder.rglob("*"))
    assert remove_abandoned() == []
    assert sorted(folder.rglob("*")) == before


def test_a_lock_file_cannot_name_other_shared_memory(owner: _Owner) -> None:
    owner.kill()
    (owner.path / "lock").write_text("sem")
    region = Path("/dev/shm", "sem.of-somebody-else")
    region.touch()
    try:
        assert remove_abandoned() == [owner.path]
        assert region.exists()
    finally:
        region.unlink()

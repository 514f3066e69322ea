"""A full disk at ``deploy`` and a port that is taken at ``serve``: said in words, and nothing half-made is left."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest
from deployed_counting_engine import write_engine_directory

from trtllm_dflash.errors import CheckpointError, ConfigError
from trtllm_dflash.serving.repository import deploy, repository_facts
from trtllm_dflash.serving.tritonserver import triton_server


@pytest.mark.fault("disk full")
@pytest.mark.parametrize("before", ["nothing", "a repository"])
def test_full_disk_leaves_the_old_repository_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    engines, repository = write_engine_directory(tmp_path / "engines"), tmp_path / "repository"
    if before == "a repository":
        deploy(engines, repository)
    old = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    real = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "wire.py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match="repository: cannot be written: No space left on device"):
        deploy(engines, repository, force=True)
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == old
    assert {path.name for path in tmp_path.iterdir()} == {"engines", *(["repository"] if old else [])}
    monkeypatch.undo()
    deploy(engines, repository, force=True)
    assert repository_facts(repository)["hashes"] == "verified"


@pytest.mark.fault("port in use")
def test_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("pytriton", reason="needs the extra `triton`")
    deploy(write_engine_directory(tmp_path / "engines"), tmp_path / "repository")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"{port}"),
            triton_server(tmp_path / "repository", http_port=port, log=tmp_path / "log", start_timeout_s=30),
        ):
            pass
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # who has the port still has it

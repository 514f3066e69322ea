"""What a server meets on the machine: IPv6 addresses, a full disk under its log, a start that fails half-way."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trtllm_dflash.serving.run_directory import PREFIX
from trtllm_dflash.serving.triton_install import TritonInstall
from trtllm_dflash.serving.triton_process import Endpoints, TritonProcess


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _install(folder: Path, script: str) -> TritonInstall:
    """A server that is a shell script."""
    binary, backend = folder / "tritonserver", folder / "python_backend"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    backend.mkdir()
    return TritonInstall(binary, backend, None, bundled=False)


@pytest.mark.parametrize(
    ("host", "http", "grpc", "url"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "http://127.0.0.1:1"),
        ("::1", "ipv6:::1", "[::1]", "http://[::1]:1"),
        ("::", "ipv6:::", "[::]", "http://[::1]:1"),
    ],
)
def test_every_part_of_tritonserver_gets_the_address_as_it_takes_it(
    folder: Path, host: str, http: str, grpc: str, url: str
) -> None:
    log = folder / "log"
    install = _install(folder, 'printf "%s\\n" "$@"')
    process = TritonProcess(install, folder / "models", "dflash", Endpoints(host, 1, 2, 3), log)
    try:
        assert process.client.url == url
        process._process.wait(timeout=10)
        said = log.read_text().splitlines()
    finally:
        process.kill()
    assert {f"--http-address={http}", f"--metrics-address={http}", f"--grpc-address={grpc}"} <= set(said)


def test_a_server_that_cannot_be_started_leaves_no_folder(folder: Path) -> None:
    install = _install(folder, "exit 0")
    install.binary.chmod(0o644)
    with pytest.raises(PermissionError):
        TritonProcess(install, folder / "models", "dflash", Endpoints("127.0.0.1", 1, 2, 3), folder / "log")
    install.binary.chmod(0o755)
    with pytest.raises(FileNotFoundError):
        TritonProcess(install, folder / "models", "dflash", Endpoints("127.0.0.1", 1, 2, 3), folder / "none" / "log")
    assert list(folder.glob(f"{PREFIX}*")) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_the_log_is_silent_and_other_faults_are_not() -> None:
    code = (
        "import logging\n"
        "from trtllm_dflash.serving.log_format import configure_logging\n"
        "configure_logging(open('/dev/full', 'w'), 'text')\n"
        "logging.getLogger('a').warning('lost')\n"
        "logging.getLogger('a').warning('%d', 'no number')\n"
        "import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "No space left" not in done.stderr
    assert "TypeError" in done.stderr

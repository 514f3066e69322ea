"""What is checked before a tritonserver is started, and the stub's own environment."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
from pathlib import Path

import pytest

from trtllm_dflash.errors import ConfigError, EngineError
from trtllm_dflash.serving import triton_install
from trtllm_dflash.serving.triton_install import TritonInstall, find_tritonserver, preflight, stub_environment

NOWHERE = TritonInstall(Path("tritonserver"), Path("python"), None, bundled=False)


@pytest.mark.fault("port in use")
def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc port {port} on 127.0.0.1 cannot be used") as caught:
            preflight(NOWHERE, {"grpc": ("127.0.0.1", port)})
    assert caught.value.hint == "choose another --grpc-port"
    preflight(NOWHERE, {"grpc": ("127.0.0.1", port)})


def test_two_equal_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match="metrics port is 18000, the same as the http port"):
        preflight(NOWHERE, {"http": ("127.0.0.1", 18000), "metrics": ("127.0.0.1", 18000)})


def test_small_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install, "MIN_SHM_BYTES", 1 << 60)
    with pytest.raises(EngineError, match="/dev/shm has"):
        preflight(NOWHERE, {})


def test_a_stub_without_its_libraries_is_refused(tmp_path: Path) -> None:
    """Started all the same, the server would wait for its stub for ever."""
    source, library, stub = tmp_path / "part.c", tmp_path / "libpart.so", tmp_path / "stub"
    source.write_text("int part(void) { return 0; }\n")
    (tmp_path / "main.c").write_text("int part(void); int main(void) { return part(); }\n")
    try:
        subprocess.run(["cc", "-shared", "-o", library, source], check=True)
        subprocess.run(["cc", "-o", stub, tmp_path / "main.c", library], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler to make an executable that misses a library")
    library.unlink()
    with pytest.raises(EngineError, match=r"Python stub needs .*libpart\.so"):
        preflight(TritonInstall(Path("tritonserver"), Path("python"), stub, bundled=True), {})


def test_no_tritonserver_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no tritonserver") as caught:
        find_tritonserver()
    assert "trtllm-dflash[triton]" in str(caught.value.hint)


def test_tritonserver_on_path_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "opt" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "opt" / "backends" / "python").mkdir(parents=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_tritonserver() == TritonInstall(binary, tmp_path / "opt" / "backends" / "python", None, bundled=False)


def test_stub_environment_without_an_index_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves nothing that a later run would take for finished."""
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(EngineError, match="cannot install numpy") as caught:
        stub_environment()
    assert "run again with network" in str(caught.value.hint)
    assert not list(tmp_path.rglob(".complete"))

"""A real tritonserver around the counting engine, shared by the tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed_counting_engine import use_counting_engine, write_engine_directory

from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server


@pytest.fixture
def engine_directory(tmp_path: Path) -> Path:
    return write_engine_directory(tmp_path / "engines")


@pytest.fixture(scope="session")
def hold_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, a new engine process does not finish loading."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "triton.log"


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory, hold_file: Path, server_log: Path) -> Iterator[ServerHandle]:
    """A real tritonserver with the proxy model, around the counting engine; one for the whole session."""
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed (pip install 'trtllm-dflash[triton]')")
    root = tmp_path_factory.mktemp("triton")
    repository = root / "repository"
    deploy(write_engine_directory(root / "engines"), repository, max_queue=8)
    use_counting_engine(repository, "--hold", str(hold_file), heartbeat_timeout_s="2", restart_wait_s="3")
    with triton_server(repository, health_port=0, log=server_log, start_timeout_s=60) as server:
        yield server

"""A real tritonserver whose parts are killed, frozen and broken: clients hear of it, and it comes back."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from deployed_counting_engine import use_counting_engine, write_engine_directory

from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.client import TritonHttpError
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

pytestmark = pytest.mark.triton


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.05)


def engine_pid(triton: ServerHandle) -> int:
    return int(str(triton.client(5).health()["engine_pid"]))


def engine_state(triton: ServerHandle) -> object:
    return triton.client(5).health()["state"]


def supervisor_health(triton: ServerHandle) -> int:
    connection = http.client.HTTPConnection(str(triton.health_url).split("/")[2], timeout=5)
    connection.request("GET", "/health")
    return connection.getresponse().status


def process_ids(pattern: str) -> set[int]:
    """Processes whose command line matches; zombies have none."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if re.search(pattern, path.read_bytes().replace(b"\0", b" ").decode(errors="replace")):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def served_again(triton: ServerHandle, timeout_s: float = 30.0) -> str:
    """The text of the next request that is served; until then, only the announced error is acceptable."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(triton.client(20).generate("hi", max_tokens=3)["text_output"])
        except TritonHttpError as error:
            if "UNAVAILABLE: the engine is restarting" not in error.text or time.monotonic() > deadline:
                raise


@pytest.fixture(autouse=True)
def _healthy_before(request: pytest.FixtureRequest) -> None:
    """Each fault meets a server that has got over the one before."""
    if "triton" in request.fixturenames:
        server = request.getfixturevalue("triton")
        wait_until(lambda: engine_state(server) == "ready" and supervisor_health(server) == 200, timeout_s=30)


class Streams:
    """Long streams in flight, and the error and time at which each ended."""

    def __init__(self, triton: ServerHandle, count: int) -> None:
        self.ends: list[tuple[float, str]] = []
        self._flowing = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(triton,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self._flowing.acquire(timeout=10)

    def _run(self, triton: ServerHandle) -> None:
        try:
            for number, _ in enumerate(triton.client(30).generate_stream("hi", max_tokens=2000)):
                if number == 0:
                    self._flowing.release()
            self.ends.append((time.monotonic(), "finished"))
        except (TritonHttpError, OSError, http.client.HTTPException) as error:
            self.ends.append((time.monotonic(), str(error)))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=30)


@pytest.mark.fault("killed")
def test_killed_engine_is_an_error_at_once_and_the_next_request_is_served(triton: ServerHandle) -> None:
    streams = Streams(triton, 8)
    victim, killed_at = engine_pid(triton), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    streams.join()
    assert served_again(triton) == "0 1 2 "
    assert len(streams.ends) == 8
    for ended_at, text in streams.ends:
        assert "UNAVAILABLE: the engine process ended (killed by signal 9) while it ran this request" in text
        assert ended_at - killed_at < 5.0
    assert engine_pid(triton) != victim


@pytest.mark.fault("killed")
def test_frozen_engine_counts_as_dead(triton: ServerHandle) -> None:
    streams = Streams(triton, 2)
    victim, frozen_at = engine_pid(triton), time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    streams.join()
    for ended_at, text in streams.ends:
        assert "gave no sign of life" in text
        assert ended_at - frozen_at < 5.0  # the test's heartbeat timeout is 2 s
    assert served_again(triton) == "0 1 2 "
    assert not Path(f"/proc/{victim}").exists()


@pytest.mark.fault("killed")
def test_an_engine_that_loads_for_long_is_waited_for(triton: ServerHandle, hold_file: Path) -> None:
    before = triton.restarts
    hold_file.touch()
    try:
        os.kill(engine_pid(triton), signal.SIGKILL)
        wait_until(lambda: engine_state(triton) == "restarting" and supervisor_health(triton) == 503, timeout_s=3)
        with pytest.raises(TritonHttpError, match="UNAVAILABLE: the engine is restarting"):
            triton.client(20).generate("hi", max_tokens=1)
        # After several crashes the next process does not start at once.
        wait_until(lambda: triton.client(5).health()["loading"] is True, timeout_s=9)
        loading = engine_pid(triton)
        for _ in range(24):  # longer than an engine that is down may stay so
            assert supervisor_health(triton) == 503
            time.sleep(0.5)
    finally:
        hold_file.unlink()
    wait_until(lambda: supervisor_health(triton) == 200, timeout_s=15)
    assert (engine_pid(triton), triton.restarts) == (loading, before)
    assert triton.client(20).generate("hi", max_tokens=1)["text_output"] == "0 "


@pytest.mark.fault("killed")
def test_killed_stub_restarts_the_server(triton: ServerHandle) -> None:
    """Triton itself would leave the requests hanging and keep saying that it is ready."""
    streams = Streams(triton, 2)
    before, first_engine = triton.restarts, engine_pid(triton)
    (stub,) = process_ids(rf"triton_python_backend_stub .*{triton.model_name}")
    os.kill(stub, signal.SIGKILL)
    streams.join()
    assert all(text != "finished" for _, text in streams.ends)
    wait_until(lambda: triton.restarts > before and supervisor_health(triton) == 200, timeout_s=20)
    assert triton.client(20).generate("hi", max_tokens=1)["text_output"] == "0 "
    wait_until(lambda: not Path(f"/proc/{first_engine}").exists(), timeout_s=5)


def test_serve_command_stops_cleanly(tmp_path: Path) -> None:
    """Ctrl-C: exit code 0, and neither processes nor shared memory are left."""
    pytest.importorskip("pytriton")
    repository = tmp_path / "repository"
    deploy(write_engine_directory(tmp_path / "engines"), repository)
    use_counting_engine(repository, "--hold", str(tmp_path / "never"))
    code = "from trtllm_dflash.cli.serve_cmd import serve; serve()"
    ports = [option for name in ("http", "grpc", "metrics", "health") for option in (f"--{name}-port", "0")]
    command = [sys.executable, "-c", code, "-m", str(repository), "--log-file", str(tmp_path / "log"), *ports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "serving dflash" in process.stdout.readline()
        assert process.stdout.readline().startswith("try: curl -N http://127.0.0.1:")
        mine = process_ids(re.escape(str(tmp_path))) - {process.pid}
        assert len(mine) >= 3  # tritonserver, its stub, the engine
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        wait_until(lambda: not process_ids(re.escape(str(tmp_path))), timeout_s=2)
        assert not list(Path("/dev/shm").glob(f"dflash_{process.pid}_*"))
    finally:
        process.kill()
        process.wait()


def test_engine_that_cannot_load_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("pytriton")
    engines = write_engine_directory(tmp_path / "engines")
    deploy(engines, tmp_path / "repository")
    (engines / "config.json").write_text((engines / "config.json").read_text() + " ")
    with (
        pytest.raises(EngineError, match=r"SHA-256 is .*, expected .* as recorded by deploy$") as caught,
        triton_server(tmp_path / "repository", log=tmp_path / "log", start_timeout_s=60),
    ):
        pass
    assert caught.value.hint == "the engine was rebuilt after deploy: run `trtllm-dflash deploy` again"

"""``serve --openai-port`` as a process: what it says, how it stops, and that nothing outlives it."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from deployed_counting_engine import use_counting_engine, write_engine_directory
from test_triton_faults import process_ids, wait_until

from trtllm_dflash.cli.serve_cmd import _chosen_ports, serve
from trtllm_dflash.errors import ConfigError
from trtllm_dflash.serving import triton_install
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.run_directory import PREFIX, remove_abandoned

pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")


def run_directories() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if (path / "lock").exists()]


class Served:
    """A running ``serve`` and the facts that it printed."""

    def __init__(self, folder: Path, *options: str, before: str = "") -> None:
        self.folder = folder
        self.log = folder / "log"
        code = (
            "from trtllm_dflash.cli import progress_lines as lines; lines.FIRST_S = 0.0; lines._LOOK_S = 0.01\n"
            f"{before}\n"
            "from trtllm_dflash.cli.main import main; main()"
        )
        ports = [
            option for name in ("http", "grpc", "metrics", "health", "openai") for option in (f"--{name}-port", "0")
        ]
        command = [sys.executable, "-c", code, "serve", "-m", str(folder / "repository"), "--json", *ports]
        self.process = subprocess.Popen(
            [*command, "--log-file", str(self.log), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text() if self.log.exists() else "no output"
        self.facts: dict[str, Any] = json.loads(line)

    def get(self, name: str, path: str) -> int:
        connection = http.client.HTTPConnection(self.facts[name].split("/")[2], timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def complete(self, key: str = "", **more: object) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.facts["openai"].split("/")[2], timeout=30)
        try:
            body = json.dumps({"model": "dflash", "prompt": "x", **more})
            connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, type(error).__name__
        finally:
            connection.close()

    def processes(self) -> set[int]:
        """Everything that it started: all of them have the folder, or a port, on their command line."""
        port = self.facts["http"].rsplit(":", 1)[1]
        return process_ids(rf"{re.escape(str(self.folder))}|--triton-url http://127.0.0.1:{port}") - {self.process.pid}


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed (pip install 'trtllm-dflash[triton]')")
    deploy(write_engine_directory(tmp_path / "engines"), tmp_path / "repository")
    use_counting_engine(tmp_path / "repository", "--hold", str(tmp_path / "never"))
    served = Served(tmp_path, *getattr(request, "param", ()))
    yield served
    served.process.kill()
    served.process.wait()
    for pid in served.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.triton
@pytest.mark.parametrize("served", [("--log-format", "json", "--drain-timeout", "20")], indirect=True)
def test_sigterm_drains(served: Served) -> None:
    """The request in flight is answered whole, a new one is refused, readiness is false, and nothing is left."""
    assert served.get("openai", "/health/ready") == served.get("health", "/health") == 200
    assert served.facts["runs"].startswith("runs target LlamaForCausalLM, speculation off (no drafter)")
    direct: list[int] = []
    found: list[tuple[int, str]] = []

    def straight_to_triton() -> None:
        connection = http.client.HTTPConnection(served.facts["http"].split("/")[2], timeout=30)
        body = json.dumps({"text_input": "x", "max_tokens": 200, "stream": True})
        connection.request("POST", "/v2/models/dflash/generate_stream", body)
        direct.append(connection.getresponse().read().count(b"data: "))

    threads = [
        threading.Thread(target=lambda: found.append(served.complete(max_tokens=200))),
        threading.Thread(target=straight_to_triton),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: served.get("openai", "/health/ready") == 503, timeout_s=2)
    assert served.get("health", "/health") == 503
    assert served.complete()[0] == 503
    for thread in threads:
        thread.join()
    assert found[0][0] == 200
    assert json.loads(found[0][1])["usage"]["completion_tokens"] == 200
    assert direct[0] >= 90  # two tokens a step
    assert served.process.wait(timeout=20) == 0
    wait_until(lambda: not served.processes(), timeout_s=3)
    assert served.process.stderr is not None
    assert "s] tritonserver is starting and the engine is loading\n" in served.process.stderr.read()
    lines = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("path") == "/v1/completions" and line["status"] == 200]
    assert line["completion_tokens"] == 200


@pytest.mark.triton
@pytest.mark.parametrize("served", [("--drain-timeout", "0.3")], indirect=True)
def test_the_drain_has_a_deadline(served: Served) -> None:
    """What is not done by then ends in an error, never in silence."""
    found: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: found.append(served.complete(max_tokens=2000))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    begun = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=20) == 0
    assert time.monotonic() - begun < 12
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(status != 200 for status, _ in found)
    wait_until(lambda: not served.processes(), timeout_s=3)


@pytest.mark.triton
def test_everything_dies_with_a_killed_serve(served: Served) -> None:
    assert len(served.processes()) >= 4  # tritonserver, its stub, the engine, the front end
    served.process.kill()
    served.process.wait()
    wait_until(lambda: not served.processes(), timeout_s=15)
    assert not list(Path("/dev/shm").glob(f"dflash_{served.process.pid}_*"))
    # It could not remove its own folder; whoever starts next does, once its guard has ended too.
    left = [
        path for path in run_directories() if (path / "lock").read_text().startswith(f"dflash_{served.process.pid}_")
    ]
    assert len(left) == 1
    wait_until(lambda: bool(remove_abandoned()) or not left[0].exists(), timeout_s=15)
    assert not left[0].exists()


@pytest.mark.triton
def test_a_killed_tritonserver_is_an_error_and_then_forgotten(served: Served) -> None:
    found: list[tuple[int, str]] = []
    threads = [
        threading.Thread(target=lambda stream=stream: found.append(served.complete(max_tokens=2000, stream=stream)))
        for stream in (True, False)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    (triton,) = process_ids("tritonserver .*" + re.escape(str(served.folder)))
    os.kill(triton, signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(status for status, _ in found) == [200, 503]
    (streamed,) = [text for status, text in found if status == 200]
    assert '"code": "engine_unavailable"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    wait_until(lambda: served.complete(max_tokens=2)[0] == 200, timeout_s=20)
    wait_until(lambda: served.get("health", "/health") == 200, timeout_s=10)


@pytest.mark.triton
@pytest.mark.fault("killed")
def test_an_engine_that_can_never_load_again_ends_serve(tmp_path: Path) -> None:
    """Neither "ready" without an engine nor exit code 0: whoever watches either of them hears of it."""
    pytest.importorskip("pytriton")
    config = write_engine_directory(tmp_path / "engines") / "config.json"
    deploy(config.parent, tmp_path / "repository")
    use_counting_engine(tmp_path / "repository", "--needs", str(config))
    patience = "from trtllm_dflash.serving import tritonserver as t; t.RELOAD_AFTER_S = .5; t.RESTART_BACKOFF_S = (0,)"
    served = Served(tmp_path, before=patience)
    try:
        assert served.get("http", "/v2/health/ready") == served.get("openai", "/health/ready") == 200
        config.unlink()
        (engine,) = process_ids("fake_engine_process.py .*" + re.escape(str(config)))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: served.get("health", "/health") != 200, timeout_s=10)
        # Triton's own readiness follows when the model is unloaded, at the latest when nothing listens any more.
        wait_until(lambda: served.get("http", "/v2/health/ready") != 200, timeout_s=30)
        assert served.process.wait(timeout=30) == 1
        assert served.process.stderr is not None
        assert "error: the model could not be loaded after" in served.process.stderr.read()
        wait_until(lambda: not served.processes(), timeout_s=5)
    finally:
        served.process.kill()
        served.process.wait()


@pytest.mark.triton
def test_a_dead_front_end_is_started_again(served: Served) -> None:
    (front_end,) = process_ids("trtllm_dflash.serving.gateway .*" + served.facts["http"].rsplit(":", 1)[1])
    os.kill(front_end, signal.SIGKILL)
    wait_until(lambda: served.get("health", "/health") == 503, timeout_s=3)
    wait_until(lambda: served.complete(max_tokens=2)[0] == 200, timeout_s=15)
    wait_until(lambda: served.get("health", "/health") == 200, timeout_s=5)


@pytest.mark.triton
@pytest.mark.parametrize("served", [("--api-key", "sesame")], indirect=True)
def test_api_key_is_asked_for_and_not_shown(served: Served) -> None:
    assert served.complete()[0] == 401
    assert served.complete(key="sesame", max_tokens=2)[0] == 200
    for pid in served.processes():
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"sesame" not in shown
        inherited = b"sesame" in Path(f"/proc/{pid}/environ").read_bytes()
        assert inherited == (b"trtllm_dflash.serving.gateway" in shown)
    assert "sesame" not in served.log.read_text()


@pytest.mark.triton
def test_a_front_end_alone_for_servers_elsewhere(served: Served, tmp_path: Path) -> None:
    code = "from trtllm_dflash.cli.serve_cmd import serve; serve()"
    command = [sys.executable, "-c", code, "--json", "--openai-port", "0", "--triton-url", served.facts["http"]]
    # One that is not there (yet) is warned of, and does not keep the others from serving.
    command += ["--triton-url", "http://127.0.0.1:9"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        served.facts["openai"] = json.loads(other.stdout.readline())["openai"]
        assert served.complete(max_tokens=3)[0] == 200
        other.send_signal(signal.SIGTERM)
        assert other.wait(timeout=15) == 0
        assert other.stderr is not None
        said = other.stderr.read()
        assert "warning: http://127.0.0.1:9: no Triton server answers: Connection refused; it gets no requests" in said
        assert said.count("warning:") == 1
        assert served.get("http", "/v2/health/ready") == 200  # what it did not start goes on
    finally:
        other.kill()
        other.wait()


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(serve, ["-m", str(tmp_path), "--openai-port", port])
    assert isinstance(result.exception, ConfigError)
    assert f"openai port {port} on 127.0.0.1 cannot be used" in str(result.exception)
    same = CliRunner().invoke(serve, ["-m", str(tmp_path), "--openai-port", "8000"])
    assert "the same as one of Triton's" in str(same.exception)


def test_ports_are_chosen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a port is given out again as soon as it is let go, what is chosen one after the other is the same port."""
    held: set[int] = set()

    class FirstFree(socket.socket):
        port = 0

        def bind(self, address: Any) -> None:
            self.port = address[1] or next(port for port in itertools.count(50000) if port not in held)
            held.add(self.port)

        def getsockname(self) -> Any:
            return "127.0.0.1", self.port

        def close(self) -> None:
            held.discard(self.port)
            super().close()

    monkeypatch.setattr(triton_install.socket, "socket", FirstFree)
    assert _chosen_ports("127.0.0.1", 0, "127.0.0.1", [0, 0, 18002, 0]) == [50000, 50001, 50002, 18002, 50003]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give -m/--model-repository"),
        (["--triton-url", "http://127.0.0.1:9"], "need --openai-port"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == 2
    assert message in result.output

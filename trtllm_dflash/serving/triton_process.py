"""One run of the tritonserver program: command line, environment, start, stop, and what it leaves behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.client import TritonClient, TritonHttpError
from trtllm_dflash.serving.run_directory import RunDirectory
from trtllm_dflash.serving.server_url import address, bracketed, reachable
from trtllm_dflash.serving.triton_errors import load_failure
from trtllm_dflash.serving.triton_install import TritonInstall, library_path, stub_environment

EXIT_TIMEOUT_S = 5


@dataclass(frozen=True)
class Endpoints:
    """Where the server listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int


class TritonProcess:
    """A running tritonserver with one model.

    Args:
        install: which program. repository: model repository. model: the model to load. endpoints: where to listen.
        log: file that receives the output of server, proxy and engine; None for this process's stderr.
    """

    def __init__(
        self, install: TritonInstall, repository: Path, model: str, endpoints: Endpoints, log: Path | None
    ) -> None:
        self._log = log
        self._log_start = log.stat().st_size if log and log.exists() else 0
        self._gone = False
        self.model = model
        url = f"http://{address(reachable(endpoints.host), endpoints.http_port)}"
        self.client = TritonClient(url, model, timeout_s=10.0)
        self._run_directory = RunDirectory()
        try:
            self._process = self._started(install, repository, endpoints)
            try:
                self._guard = _guard_of(self._process.pid, self._run_directory.lock)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            self._run_directory.remove()
            raise

    def _started(self, install: TritonInstall, repository: Path, endpoints: Endpoints) -> subprocess.Popen[bytes]:
        backends = self._run_directory.path / "backends"
        (backends / "python").mkdir(parents=True)
        for path in install.python_backend.iterdir():
            (backends / "python" / path.name).symlink_to(path)
        if install.stub is not None:
            (backends / "python" / install.stub.name).symlink_to(install.stub)
        # evhtp, which serves HTTP and metrics, takes "::1" for 255.255.255.255, and would never be ready.
        http_host = f"ipv6:{endpoints.host}" if ":" in endpoints.host else endpoints.host
        command = [
            str(install.binary),
            f"--model-repository={repository.resolve()}",
            f"--backend-directory={backends}",
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            f"--load-model={self.model}",
            f"--http-address={http_host}",
            f"--grpc-address={bracketed(endpoints.host)}",
            f"--metrics-address={http_host}",
            f"--http-port={endpoints.http_port}",
            f"--grpc-port={endpoints.grpc_port}",
            f"--metrics-port={endpoints.metrics_port}",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={self._run_directory.shm_prefix}",
            "--backend-config=python,shm-default-byte-size=4194304",
        ]
        environment = _environment(install)
        output = self._log.open("ab") if self._log else None
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr,
                stderr=output or sys.stderr,
                env=environment,
                # Its own group: the terminal's Ctrl-C reaches only us, and one signal reaches server and stubs.
                start_new_session=True,
                cwd=self._run_directory.path,
            )
        finally:
            if output:
                output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The server's exit code, or None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the model is loaded; raises ``EngineError`` with the reason when it cannot be."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (code := self.exit_code()) is not None:
                raise self._not_started(f"tritonserver ended with exit code {code} while starting")
            if self.client.ready():
                return
            time.sleep(0.05)
        raise self._not_started(f"tritonserver was not ready after {timeout_s:.0f} s")

    def _not_started(self, what: str) -> EngineError:
        if self._log is None:
            return EngineError(what, hint="its output above names the cause")
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        if meaning := load_failure(text):
            return EngineError(f"{what}: {meaning.message}", hint=meaning.hint)
        complaints = [line for line in text.splitlines() if re.match(r"E\d{4} |error:|failed", line)]
        reason = " | ".join(complaints[-3:])
        return EngineError(f"{what}: {reason}" if reason else what, hint=f"its log is {self._log}")

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let those in flight finish for ``timeout_s`` seconds, then end each with an error."""
        try:
            self.client.generate(control="drain")
            deadline = time.monotonic() + timeout_s
            while self.client.health()["in_flight"] and time.monotonic() < deadline and self.exit_code() is None:
                time.sleep(0.05)
            self.client.generate(control="abort")
        except (TritonHttpError, OSError, http.client.HTTPException):
            pass  # an unwell server has nothing to drain; stop() ends it

    def stop(self) -> None:
        """Unload the model, stop the server; kill what does not leave; remove its shared memory."""
        if self.exit_code() is None:
            self._unload()
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=EXIT_TIMEOUT_S + 5)
        self.kill()

    def kill(self) -> None:
        """End server and stubs at once; the engine process follows when its socket closes."""
        if self._gone:
            return
        self._guard.kill()
        self._guard.wait()
        # Also after a regular exit: a stub may have outlived its server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._gone = True
        self._run_directory.remove()

    def _unload(self) -> None:
        """Let the requests in flight finish, for a while, and the engine leave in its own order."""
        try:
            self.client.repository_request("unload")
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline and self.model_state() in ("READY", "UNLOADING"):
                time.sleep(0.05)
        except (OSError, http.client.HTTPException):
            pass  # the listener is gone already; the signals that follow do the rest

    def model_state(self) -> str:
        """State of the model in the server's index: ``READY``, ``LOADING``, ``UNLOADING`` or ``UNAVAILABLE``."""
        _, index = self.client.repository_request("index")
        for entry in index if isinstance(index, list) else []:
            if entry.get("name") == self.model:
                return str(entry.get("state", "UNAVAILABLE"))
        return "UNAVAILABLE"


def _guard_of(group: int, lock: int) -> subprocess.Popen[bytes]:
    """A small process that ends the process group ``group`` when this process is gone, however it went.

    It holds one end of a pipe whose other end only we have. A parent-death signal would be simpler, but it follows the
    thread that started the server, not the process. It also holds the run directory's ``lock``: the directory is not
    abandoned as long as the server may still be ending.
    """
    script = "cat; kill -s TERM -- -$0; sleep 8; kill -s KILL -- -$0"
    return subprocess.Popen(
        ["/bin/sh", "-c", script, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock],
        start_new_session=True,
    )


def _environment(install: TritonInstall) -> dict[str, str]:
    environment = dict(os.environ)
    if not install.bundled:
        return environment
    environment.pop("VIRTUAL_ENV", None)
    # The engine process runs in our own environment again: model.py's link puts these two back.
    for name in ("PATH", "LD_LIBRARY_PATH"):
        environment[f"TRTLLM_DFLASH_SAVED_{name}"] = os.environ.get(name, "")
    environment["PATH"] = f"{stub_environment() / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    environment["LD_LIBRARY_PATH"] = library_path()
    return environment

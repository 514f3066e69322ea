"""A supervised tritonserver: ``with triton_server(repository) as server: server.http_url``.

What can go wrong, who sees it, and what then happens:

- The engine process dies or hangs. The proxy model sees it (end of file; no heartbeat), fails the requests in flight
  and starts a new engine, which may load for ``start_timeout_s``. Triton's model cannot be made unready from inside, so
  when no engine is ready after ``RELOAD_AFTER_S`` and none is loading (the last one ended before it was ready), the
  supervisor unloads and loads the model: ``/v2/health/ready`` is then false until an engine is ready.
- The proxy (Triton's Python stub) dies. Triton itself does not notice, requests in flight would hang: the supervisor's
  health request fails, and it kills and restarts the whole server.
- tritonserver dies: restarted.
- Generation itself is broken although everything is alive: a canary request (one token; while nothing else runs, and
  after a request failed inside the engine) fails, and the server is restarted.

An operator watches the supervisor's ``/health`` (right at once in all of these cases) or Triton's ``/v2/health/ready``
(true while a crashed engine loads again: unloading the model would throw that load away), never ``/v2/health/live``
alone. After ``MAX_FAILURES`` failed restarts in a row the supervisor gives up: it stops the server, and ``serve`` ends
with exit code 1.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.client import TritonClient, TritonHttpError
from trtllm_dflash.serving.repository import repository_model
from trtllm_dflash.serving.server_url import address
from trtllm_dflash.serving.triton_errors import load_failure
from trtllm_dflash.serving.triton_install import find_tritonserver, free_ports, preflight
from trtllm_dflash.serving.triton_process import Endpoints, TritonProcess
from trtllm_dflash.serving.wire import CANARY_ID

CHECK_INTERVAL_S = 0.5
CHECK_TIMEOUT_S = 3.0
CANARY_INTERVAL_S = 15.0
CANARY_TIMEOUT_S = 20.0
RELOAD_AFTER_S = 10.0
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)
MAX_FAILURES = len(RESTART_BACKOFF_S)
STRIKES = 3
_log = logging.getLogger(__name__)


class ServerHandle:
    """A supervised server; made by :func:`triton_server` or :meth:`start`.

    Attributes:
        model_name: the served model. http_url, metrics_url: with scheme. grpc_url: ``host:port``, as tritonclient
        wants it. health_url: the supervisor's own ``/health``, or None. restarts: server restarts and model reloads so
        far. also_ready: what else must be well before ``/health`` says ready: returns the problem, or None.
    """

    def __init__(
        self,
        repository: Path,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        health_port: int | None = None,
        host: str = "127.0.0.1",
        log: Path | None = None,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self.model_name = repository_model(repository)
        self._repository, self._log_path, self._start_timeout_s = repository, log, start_timeout_s
        self._install = find_tritonserver()
        ports = free_ports(host, [http_port, grpc_port, metrics_port, *([] if health_port is None else [health_port])])
        self._endpoints = Endpoints(host, *ports[:3])
        preflight(
            self._install,
            {name: (host, port) for name, port in zip(("http", "grpc", "metrics", "health"), ports, strict=False)},
        )
        self.http_url = f"http://{address(host, ports[0])}"
        self.grpc_url = address(host, ports[1])
        self.metrics_url = f"http://{address(host, ports[2])}/metrics"
        self.health_url = None if health_port is None else f"http://{address(host, ports[3])}/health"
        self.restarts = 0
        self.also_ready: Callable[[], str | None] = lambda: None
        self._status: dict[str, object] = {"status": "starting"}
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self.failure: EngineError | None = None
        self._process: TritonProcess | None = None
        self._strikes = 0
        self._canary_due = 0.0
        self._failed = 0
        self._watcher = threading.Thread(target=self._watch, name="triton-supervisor", daemon=True)
        self._health_server = _health_server(host, ports[3], self.status) if health_port is not None else None

    def start(self) -> None:
        """Start the server, wait for the model, then supervise it. Raises ``EngineError`` with the reason."""
        try:
            self._launch()
        except BaseException:
            self._close_health_server()
            raise
        self._watcher.start()

    def client(self, timeout_s: float = 120.0) -> TritonClient:
        """A new client of the served model."""
        return TritonClient(self._current().client.url, self.model_name, timeout_s=timeout_s)

    def status(self) -> dict[str, object]:
        """What the supervisor last saw: ``status`` is ``ready``, or why it is not; and the engine's statistics."""
        facts = {**self._status, "server_restarts": self.restarts}
        if facts["status"] == "ready" and (problem := self.also_ready()) is not None:
            facts["status"] = problem
        return facts

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the supervisor gave up (``failure`` is set) or ``stop`` was called; False after ``timeout_s``."""
        return self._ended.wait(timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Before :meth:`stop`: refuse new requests and let those in flight finish, at most ``timeout_s`` seconds."""
        self._stopping.set()
        self._status = {"status": "draining"}
        if self._process is not None and self._process.exit_code() is None:
            self._process.drain(timeout_s)

    def stop(self) -> None:
        """Stop supervising and stop the server; no process and no shared memory is left."""
        self._stopping.set()
        self._status = {"status": "stopping"}
        if self._watcher.is_alive():
            # The watcher may be inside a model load that takes minutes: stopping the server below ends that request.
            self._watcher.join(timeout=CHECK_TIMEOUT_S + 1.0)
        if self._process is not None:
            self._process.stop()
        if self._watcher.is_alive():
            self._watcher.join(timeout=10.0)
        self._close_health_server()
        self._ended.set()

    def _current(self) -> TritonProcess:
        if self._process is None:
            raise EngineError("the server was not started", hint="use `with triton_server(...) as server:`")
        return self._process

    def _launch(self) -> None:
        self._process = TritonProcess(self._install, self._repository, self.model_name, self._endpoints, self._log_path)
        try:
            self._process.wait_ready(self._start_timeout_s)
        except BaseException:
            self._process.kill()
            raise
        self._status = {"status": "ready"}

    # ---- supervision (watcher thread)

    def _watch(self) -> None:
        self._strikes, self._canary_due = 0, time.monotonic()
        while not self._stopping.wait(CHECK_INTERVAL_S):
            try:
                self._check()
            except Exception:
                # Supervision must outlive its own mistakes; the next round looks again.
                _log.exception("a check of the server failed")

    def _check(self) -> None:
        """One look at the server, and what follows from it."""
        if (code := self._current().exit_code()) is not None:
            return self._restart(f"tritonserver ended with exit code {code}")
        try:
            facts = self._client(CHECK_TIMEOUT_S).health()
        except TritonHttpError as error:
            if "is not healthy" in error.text:
                return self._restart("Triton's Python stub died")
            return self._reload(f"the model does not answer: {error.message}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._strikes += 1
            self._status = {"status": f"no answer to {self._strikes} health requests in a row"}
            if self._strikes >= STRIKES:
                self._strikes = 0
                self._restart(f"no answer to {STRIKES} health requests: {error}")
            return None
        self._strikes = 0
        state = str(facts["state"])
        self._status = {"status": state, "engine": facts}
        if state != "ready":
            self._canary_due = time.monotonic()
            if engine_is_down(facts):
                self._reload(f"the engine is {state} for {facts['down_s']} s")
        elif self._failures_grew(facts) or (facts["in_flight"] == 0 and time.monotonic() >= self._canary_due):
            self._canary_due = time.monotonic() + CANARY_INTERVAL_S
            self._canary()
        return None

    def _failures_grew(self, facts: dict[str, object]) -> bool:
        """Whether requests failed inside the engine since the last look: a device error may have broken it for good."""
        stats = facts["stats"]
        failed = int(stats.get("requests_failed", 0)) if isinstance(stats, dict) else 0
        grew = failed > self._failed
        self._failed = failed
        return grew

    def _canary(self) -> None:
        try:
            self._client(CANARY_TIMEOUT_S).generate("Hello", max_tokens=1, id=CANARY_ID)
        except TritonHttpError as error:
            if "UNAVAILABLE" not in error.text:  # the engine is known to be away, or busy: the health request tells
                self._restart(f"the canary request failed: {error.message}")
        except (OSError, http.client.HTTPException) as error:
            if self._current().exit_code() is None:
                self._restart(f"the canary request got no answer: {error}")

    def _reload(self, reason: str) -> None:
        """Unload and load the model: Triton is not ready meanwhile, as it should be without an engine."""
        self._status = {"status": f"reloading: {reason}"}
        _log.warning("reloading the model: %s", reason)
        process = self._current()
        try:
            process.client.repository_request("unload")
            deadline = time.monotonic() + 30.0
            while process.model_state() in ("READY", "UNLOADING") and not self._stopping.wait(0.05):
                if time.monotonic() > deadline:
                    return self._restart("the model could not be unloaded")
            for delay_s in RESTART_BACKOFF_S:
                if self._stopping.wait(delay_s):
                    return None
                self.restarts += 1
                status, body = self._client(self._start_timeout_s).repository_request("load")
                if status == 200:
                    return None
                said = str(body.get("error", body)) if isinstance(body, dict) else str(body)
                meaning = load_failure(said)
                _log.error("the model could not be loaded: %s", meaning.message if meaning else said)
                self._status = {"status": "the engine could not be loaded"}
            return self._give_up(f"the model could not be loaded after {MAX_FAILURES} attempts")
        except (OSError, http.client.HTTPException) as error:
            return self._restart(f"tritonserver does not answer: {error}")

    def _restart(self, reason: str) -> None:
        self._status = {"status": f"restarting: {reason}"}
        _log.warning("restarting tritonserver: %s", reason)
        self._current().kill()
        for delay_s in RESTART_BACKOFF_S:
            if self._stopping.wait(delay_s):
                return
            self.restarts += 1
            try:
                self._launch()
                return
            except EngineError as error:
                _log.error("%s", error)
        self._give_up(f"tritonserver could not be started again after {MAX_FAILURES} attempts")

    def _give_up(self, reason: str) -> None:
        if self._stopping.is_set():
            return
        self._status = {"status": "failed"}
        self.failure = EngineError(reason, hint="the server's log names the cause")
        self._stopping.set()
        self._current().stop()
        self._ended.set()

    def _client(self, timeout_s: float) -> TritonClient:
        return TritonClient(self._current().client.url, self.model_name, timeout_s=timeout_s)

    def _close_health_server(self) -> None:
        if self._health_server is not None:
            self._health_server.shutdown()
            self._health_server.server_close()


def engine_is_down(facts: Mapping[str, object]) -> bool:
    """Whether the model must be loaded anew, by the proxy's health answer ``facts``.

    A large engine loads for minutes: as long as one is loading, a reload would only throw away what it has loaded.
    """
    away = facts["state"] != "ready" and float(str(facts["down_s"])) > RELOAD_AFTER_S
    return away and not facts.get("loading", False)


@contextmanager
def triton_server(
    repository: Path,
    *,
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    health_port: int | None = None,
    host: str = "127.0.0.1",
    log: Path | None = None,
    start_timeout_s: float = 1800.0,
) -> Iterator[ServerHandle]:
    """Run a supervised tritonserver on a repository that ``deploy`` wrote; it is stopped on leaving the block.

    Args:
        repository: model repository. http_port, grpc_port, metrics_port: 0 picks a free one.
        health_port: port of the supervisor's ``/health`` (0 picks one), or None for none.
        host: address to listen on. log: file for all output, or None for stderr. start_timeout_s: longest load.

    Raises:
        ConfigError: no tritonserver, not a repository, a port is taken. EngineError: it does not start; says why.
    """
    handle = ServerHandle(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        health_port=health_port,
        host=host,
        log=log,
        start_timeout_s=start_timeout_s,
    )
    try:
        handle.start()
        yield handle
    finally:
        handle.stop()


def _health_server(host: str, port: int, status: object) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health":
                self.send_error(404, "expected /health")
                return
            facts = status()  # type: ignore[operator]
            body = json.dumps(facts).encode()
            self.send_response(200 if facts["status"] == "ready" else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health-endpoint", daemon=True).start()
    return server

"""Starts the OpenAI front end as a process of its own and keeps it running."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trtllm_dflash.errors import ConfigError, DFlashError, EngineError
from trtllm_dflash.serving.client import TritonClient
from trtllm_dflash.serving.gateway.settings import API_KEY_VARIABLE
from trtllm_dflash.serving.server_url import address, reachable

START_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
_MOST_ASKED = 32
# A life this long proves that it can work: the next end of it is restarted without delay.
GOOD_LIFE_S = 60.0
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
_log = logging.getLogger(__name__)


class FrontEnd:
    """The front end's process.

    Args:
        triton_urls: of the replicas. triton_model: the model's name there. served_names: names for clients.
        host, port: where it listens. api_key: accepted keys, comma-separated, or None for no authentication.
        drain_timeout_s: how long running requests may go on after :meth:`drain`. log_format: ``text`` or ``json``.
        log: file for its log, or None for stderr.

    Attributes:
        url: with scheme. failure: set when it could not be kept running. restarts: so far.

    Raises:
        ConfigError: its packages are not installed.
    """

    def __init__(
        self,
        triton_urls: Sequence[str],
        *,
        triton_model: str,
        served_names: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 9000,
        api_key: str | None = None,
        drain_timeout_s: float = 30.0,
        log_format: str = "text",
        log: Path | None = None,
    ) -> None:
        missing = [name for name in ("aiohttp", "fastapi", "prometheus_client", "uvicorn") if not _installed(name)]
        if missing:
            raise ConfigError(
                f"the OpenAI front end needs {', '.join(missing)}, not installed here",
                hint="pip install 'trtllm-dflash[openai]'",
            )
        self.url = f"http://{address(host, port)}"
        self.failure: EngineError | None = None
        self.restarts = 0
        self._address = (reachable(host), port)
        self._drain_timeout_s = drain_timeout_s
        self._log_path = log
        self._command = [sys.executable, "-m", "trtllm_dflash.serving.gateway"]
        for url in triton_urls:
            self._command += ["--triton-url", url]
        for name in served_names:
            self._command += ["--served-name", name]
        self._command += ["--triton-model", triton_model, "--host", host, "--port", str(port)]
        self._command += ["--drain-timeout", str(drain_timeout_s), "--log-format", log_format]
        # By the environment: everybody can read the command line of a process.
        self._environment = {**os.environ}
        self._environment.pop(API_KEY_VARIABLE, None)
        if api_key:
            self._environment[API_KEY_VARIABLE] = api_key
        self._process: subprocess.Popen[bytes] | None = None
        self._leash = -1
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="front-end-supervisor", daemon=True)

    def start(self) -> None:
        """Start it and wait until it answers; raises ``EngineError``."""
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        self._watcher.start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def problem(self) -> str | None:
        """Why it cannot take requests, or None when it can."""
        if self._stopping.is_set():
            return "the front end is stopping"
        return None if self._status("/health/ready") == 200 else "the front end is not ready"

    def drain(self) -> None:
        """Refuse new requests, wait for the running ones (within the deadline), then end it."""
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=self._drain_timeout_s + 5.0)
        self.stop()

    def stop(self) -> None:
        """End it at once."""
        self._stopping.set()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=5.0)
        self._kill()

    def _launch(self) -> None:
        theirs, self._leash = os.pipe()
        output = self._log_path.open("ab") if self._log_path else None
        try:
            self._process = subprocess.Popen(
                [*self._command, "--leash-fd", str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr,
                stderr=output or sys.stderr,
                env=self._environment,
                pass_fds=[theirs],
                start_new_session=True,  # the terminal's Ctrl-C is for us; we end it in order
            )
        finally:
            os.close(theirs)
            if output:
                output.close()
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._status("/health/live") != 200:
            if (code := self._process.poll()) is not None:
                raise EngineError(f"the front end ended with exit code {code} while starting; its log says why")
            if time.monotonic() > deadline:
                raise EngineError(f"the front end did not answer within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)

    def _watch(self) -> None:
        failures, began = 0, time.monotonic()
        while not self._stopping.wait(0.2):
            process = self._process
            if process is None or (code := process.poll()) is None:
                continue
            failures = 0 if time.monotonic() - began > GOOD_LIFE_S else failures
            _log.error("the front end ended with exit code %s", code)
            self._kill()
            if failures == len(BACKOFF_S):
                self.failure = EngineError(
                    f"the front end ended {failures + 1} times in a row", hint="its log names the cause"
                )
                return
            if self._stopping.wait(BACKOFF_S[failures]):
                return
            failures, began = failures + 1, time.monotonic()
            self.restarts += 1
            try:
                self._launch()
            except EngineError as error:
                _log.error("%s", error)

    def _kill(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection(*self._address, timeout=3.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def replica_problems(triton_urls: Sequence[str], model: str) -> list[DFlashError]:
    """What keeps each of ``triton_urls`` from serving ``model`` now, for those that cannot; each with a hint."""
    if not triton_urls:
        return []
    # At the same time: each of those that are gone takes the whole of ASK_TIMEOUT_S.
    with ThreadPoolExecutor(max_workers=min(len(triton_urls), _MOST_ASKED)) as asking:
        answers = list(asking.map(lambda url: _replica_problem(url, model), triton_urls))
    return [problem for problem in answers if problem is not None]


def _replica_problem(url: str, model: str) -> DFlashError | None:
    try:
        state = TritonClient(url, model, timeout_s=ASK_TIMEOUT_S).health()["state"]
    except DFlashError as error:
        return error
    except (KeyError, ValueError):
        return ConfigError(f"{url}: {model!r} is not a model of this toolkit", hint="serve what `deploy` writes")
    if state == "ready":
        return None
    return EngineError(f"{url}: the engine of {model!r} is {state}", hint="its log says more")


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

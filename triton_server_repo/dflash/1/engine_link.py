"""Keeps one engine process alive behind a Unix socket pair: start, watch, kill when hung, restart with back-off.

Standard library only (besides ``wire``): this runs inside Triton's Python stub. The socket pair is also the leash:
when this process goes away for whatever reason, the engine reads end-of-file and exits, so no engine is ever left over.
"""

import contextlib
import os
import socket
import subprocess
import threading
import time

import wire

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
# A life this long proves that the engine can work, so that the next crash restarts without delay.
GOOD_LIFE_S = 60.0


class EngineDown(Exception):
    """The engine cannot take a request now; the text says why, without paths."""


class EngineLink:
    """The engine process of this model.

    Args:
        command: argument list of the engine process; ``--fd N`` is added.
        on_message: called with each message of the engine, on the keeper thread.
        on_ready: called when an engine became ready, on the keeper thread. on_lost: called with its number and the
        reason when one ended. log: takes one line of text. start_timeout_s: a load that takes longer is killed.
        heartbeat_timeout_s: silence after which the process counts as hung.
        stall_timeout_s: time without progress on running requests, or on taking one in, after which it counts as hung.
    """

    def __init__(
        self, command, *, on_message, on_ready, on_lost, log, start_timeout_s, heartbeat_timeout_s, stall_timeout_s
    ):
        self._command = list(command)
        self._on_message, self._on_ready, self._on_lost, self._log = on_message, on_ready, on_lost, log
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._first_outcome = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)
        self._connection = None
        self._process = None
        self._life_began = self._last_beat = time.monotonic()
        self._kill_reason = None
        self.state = "starting"
        self.life = 0  # number of the current engine process, counted from 1
        self.down_since = time.monotonic()
        self.limits = {}
        self.stats = {}
        self.samples = []  # the last heartbeat's metric samples
        self.restarts = 0
        self.last_error = None

    def start(self):
        """Start the first engine and wait for it; raises ``EngineDown`` with its own message when it cannot load."""
        self._keeper.start()
        self._watchdog.start()
        self._first_outcome.wait()
        if self.state != "ready":
            self.close()
            raise EngineDown(self.last_error)

    def send(self, message):
        """Pass a message on and return the number of the engine process that has it.

        Raises ``EngineDown`` while no engine is ready.
        """
        with self._lock:
            if self.state != "ready":
                raise EngineDown(self.last_error or "the engine is starting")
            try:
                self._connection.send(message)
                return self.life
            except OSError as error:
                raise EngineDown("the engine process has just died") from error

    def facts(self):
        """State of the engine for the supervisor: a JSON-able mapping."""
        down_s = 0.0 if self.state == "ready" else time.monotonic() - self.down_since
        process = self._process
        return {
            "state": self.state,
            "down_s": round(down_s, 3),
            # A process that lives and is not ready yet; the watchdog ends it after start_timeout_s.
            "loading": self.state != "ready" and process is not None and process.poll() is None,
            "restarts": self.restarts,
            "engine_pid": process.pid if process else None,
            "error": self.last_error if self.state != "ready" else None,
            "stats": self.stats,
        }

    def close(self):
        """Ask the engine to leave, wait a little, then kill it."""
        self._stopping.set()
        with self._lock:
            connection, process = self._connection, self._process
            self.state = "stopped"
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(wire.Shutdown())
        if process is not None:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._keeper.is_alive() and threading.current_thread() is not self._keeper:
            self._keeper.join(timeout=5.0)

    def _keep(self):
        failures = 0
        while not self._stopping.is_set():
            became_ready_at = None
            try:
                became_ready_at, reason = self._one_life()
            except Exception as error:  # e.g. fork failed: no memory, no processes
                reason = f"the engine process could not be started: {type(error).__name__}"
                self._log(f"{reason}: {error}")
            with self._lock:
                if self._stopping.is_set():
                    break
                self.state, self.last_error, self.stats = "restarting", reason, {}
                if became_ready_at is not None:
                    self.down_since = time.monotonic()
            self._on_lost(self.life, reason)
            self._log(reason)
            if not self._first_outcome.is_set():
                self.state = "failed"
                self._first_outcome.set()
                return
            lived_s = time.monotonic() - became_ready_at if became_ready_at is not None else 0.0
            failures = 1 if lived_s > GOOD_LIFE_S else failures + 1
            if self._stopping.wait(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]):
                break
            self.restarts += 1
        self._first_outcome.set()

    def _one_life(self):
        """Run one engine process to its end; returns (time when it became ready or None, why it ended)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [*self._command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=engine_environment(os.environ),
                # Signals to the server's process group (Ctrl-C) are not for the engine: it leaves by the socket.
                start_new_session=True,
            )
        connection = wire.Connection(ours)
        with self._lock:
            self._process, self._kill_reason = process, None
            self.life += 1
            self._life_began = time.monotonic()
        became_ready_at, load_error, broken = None, None, None
        while True:
            try:
                message = connection.receive()
            except wire.WireError as error:
                broken = f"the engine process sent a broken message: {error}"
                process.kill()
                break
            if message is None:
                break
            if isinstance(message, wire.Ready):
                if message.protocol != wire.PROTOCOL_VERSION:
                    load_error = (
                        f"the engine process speaks protocol {message.protocol}, this model repository "
                        f"{wire.PROTOCOL_VERSION}: deploy it again with the installed toolkit"
                    )
                    process.kill()
                    break
                became_ready_at = self._last_beat = time.monotonic()
                with self._lock:
                    if self._stopping.is_set():
                        break
                    self._connection, self.limits, self.state = connection, message.limits, "ready"
                self._first_outcome.set()
                self._on_ready()
            elif isinstance(message, wire.LoadFailed):
                load_error = f"the engine could not be loaded: {message.message}"
            elif isinstance(message, wire.Heartbeat):
                self._last_beat = time.monotonic()
                self.stats = message.stats
                self.samples = message.samples
                if message.stalled_s > self._stall_timeout_s:
                    self._kill(f"the engine made no progress on its requests for {message.stalled_s:.0f} s")
            else:
                self._on_message(message)
        with self._lock:
            self._connection = None
        connection.close()
        try:
            code = process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"the engine process ended ({ended})"
        if became_ready_at is None:
            reason += " before it was loaded: the server's log has its last words"
        return became_ready_at, load_error or broken or self._kill_reason or reason

    def _watch(self):
        while not self._stopping.wait(0.5):
            now = time.monotonic()
            if self.state == "ready" and now - self._last_beat > self._heartbeat_timeout_s:
                self._kill(f"the engine process gave no sign of life for {now - self._last_beat:.0f} s")
            elif self._connection is None and now - self._life_began > self._start_timeout_s:
                self._kill(f"the engine was not loaded after {self._start_timeout_s:.0f} s")

    def _kill(self, reason):
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                return
            self._kill_reason = reason
        process.kill()


def engine_environment(environment):
    """The environment for the engine: what ``serve`` changed for Triton's own sake is put back."""
    restored = dict(environment)
    for name in ("LD_LIBRARY_PATH", "PATH"):
        saved = restored.pop(f"TRTLLM_DFLASH_SAVED_{name}", None)
        if saved is not None:
            restored[name] = saved
            if not saved:
                del restored[name]
    return restored

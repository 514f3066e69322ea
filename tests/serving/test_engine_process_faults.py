"""The real engine process on a tiny pair: terminated, killed, broken files; every request still gets its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtllm_dflash.serving import wire

LONG = {"max_tokens": [200], "ignore_eos": [True], "text_input": ["hello d"]}


class EngineProcess:
    """One engine process, and this test as its proxy."""

    def __init__(self, engines: Path, *options: str) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "trtllm_dflash.serving.engine_process", "--engines", str(engines)]
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", "--fd", str(theirs.fileno()), *options], pass_fds=[theirs.fileno()]
            )
        ours.settimeout(60)
        self.connection = wire.Connection(ours)

    def messages(self) -> Iterator[wire.Message]:
        while (message := self.connection.receive()) is not None:
            yield message

    def rest(self) -> tuple[dict[str, wire.Delta | wire.Failed], list[wire.Heartbeat]]:
        """Everything up to the end of the connection: the last message of each request, and the heartbeats."""
        ends: dict[str, wire.Delta | wire.Failed] = {}
        beats = []
        for message in self.messages():
            if isinstance(message, wire.Failed) or (isinstance(message, wire.Delta) and message.finish_reason):
                assert message.id not in ends, "a request ends once"
                ends[message.id] = message
            elif isinstance(message, wire.Heartbeat):
                beats.append(message)
        return ends, beats


@pytest.fixture
def start() -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def begin(engines: Path, *options: str) -> EngineProcess:
        started.append(EngineProcess(engines, *options))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


def _is_ready(engine: EngineProcess) -> bool:
    return isinstance(engine.connection.receive(), wire.Ready)


def _wait_for_output(engine: EngineProcess, identity: str) -> None:
    for message in engine.messages():
        if isinstance(message, wire.Delta) and message.id == identity:
            return
    raise AssertionError("the connection ended first")


@pytest.mark.fault("sigterm")
def test_sigterm_lets_running_requests_finish(tiny_engines: Callable, start: Callable) -> None:
    engine = start(tiny_engines("llama-v2"))
    assert _is_ready(engine)
    for number in range(20):  # some of them still wait for a slot
        engine.connection.send(wire.Generate(f"{number}", LONG))
    _wait_for_output(engine, "3")
    engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    engine.connection.send(wire.Generate("late", LONG))
    ends, _ = engine.rest()
    assert engine.process.wait(timeout=10) == 0
    late = ends.pop("late")
    assert isinstance(late, wire.Failed)
    assert (late.code, "shutting down" in late.message) == ("UNAVAILABLE", True)
    assert {getattr(end, "finish_reason", None) for end in ends.values()} == {"length"}
    assert len(ends) == 20


@pytest.mark.fault("sigterm")
def test_sigterm_with_a_deadline_fails_what_is_left(tiny_engines: Callable, start: Callable) -> None:
    engine = start(tiny_engines("llama-v2"), "--drain-s", "0.05")
    assert _is_ready(engine)
    for number in range(60):
        engine.connection.send(wire.Generate(f"{number}", LONG))
    _wait_for_output(engine, "0")
    engine.process.send_signal(signal.SIGTERM)
    ends, _ = engine.rest()
    assert engine.process.wait(timeout=10) == 0
    assert len(ends) == 60
    failed = [end for end in ends.values() if isinstance(end, wire.Failed)]
    assert failed
    assert {end.code for end in failed} == {"UNAVAILABLE"}


@pytest.mark.fault("killed")
def test_killed_engine_closes_its_connection_at_once(tiny_engines: Callable, start: Callable) -> None:
    """That is how the proxy knows which requests to fail (see the Triton tests), and a new process starts clean."""
    engine = start(tiny_engines("llama-v2"))
    assert _is_ready(engine)
    engine.connection.send(wire.Generate("1", LONG))
    _wait_for_output(engine, "1")
    os.kill(engine.process.pid, signal.SIGKILL)
    ends, _ = engine.rest()
    assert "1" not in ends
    assert engine.process.wait(timeout=5) == -signal.SIGKILL
    again = start(tiny_engines("llama-v2"))
    assert _is_ready(again)
    beat = next(message for message in again.messages() if isinstance(message, wire.Heartbeat))
    assert beat.stats["pages_free"] == beat.stats["pages_total"]


@pytest.mark.fault("client gone")
def test_cancelled_requests_give_everything_back(tiny_engines: Callable, start: Callable) -> None:
    engine = start(tiny_engines("llama-v2"))
    assert _is_ready(engine)
    for number in range(24):
        engine.connection.send(wire.Generate(f"{number}", LONG))
    _wait_for_output(engine, "0")
    for number in range(24):
        engine.connection.send(wire.Cancel(f"{number}"))
    ended: set[str] = set()
    for message in engine.messages():
        if isinstance(message, wire.Delta) and message.finish_reason:
            ended.add(message.id)
        if isinstance(message, wire.Heartbeat) and len(ended) == 24:
            break
    stats = message.stats  # type: ignore[union-attr]
    assert (stats["running"], stats["waiting"], stats["pages_used"]) == (0, 0, 0)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["requests_cancelled"] > 0


@pytest.mark.fault("corrupt engine file")
@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_corrupt_engine_file_is_a_permanent_failure_with_its_name(
    tiny_engines: Callable, start: Callable, tmp_path: Path, damage: str
) -> None:
    """Permanent: a restart cannot help, so nobody restarts it for ever. Ready is never said."""
    engines = tmp_path / "engines"
    shutil.copytree(tiny_engines("llama-v2"), engines)
    path = engines / "target" / "rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data if damage == "changed" else data[:-100])
    engine = start(engines)
    message = engine.connection.receive()
    assert isinstance(message, wire.LoadFailed)
    assert message.permanent
    assert "rank0.safetensors" in message.message
    assert engine.process.wait(timeout=10) == 1

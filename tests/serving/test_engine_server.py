"""The engine side of the socket, around the counting engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine_process import LIMITS, CountingEngine, engine_server

from trtllm_dflash.serving import wire
from trtllm_dflash.serving.engine_server import merge_deltas
from trtllm_dflash.serving.path_redaction import without_paths


@pytest.fixture
def proxy() -> Iterator[wire.Connection]:
    """The proxy's end of a connection to a running server."""
    ours, theirs = socket.socketpair()
    server = engine_server(CountingEngine(0.002), wire.Connection(theirs))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    connection = wire.Connection(ours)
    yield connection
    connection.close()
    thread.join(timeout=5)
    assert not thread.is_alive()


def collect(connection: wire.Connection, identity: str) -> list[wire.Delta | wire.Failed]:
    """What arrives for one request, up to its end."""
    found: list[wire.Delta | wire.Failed] = []
    while (message := connection.receive()) is not None:
        if isinstance(message, wire.Delta | wire.Failed) and message.id == identity:
            found.append(message)
            if isinstance(message, wire.Failed) or message.finish_reason:
                return found
    raise AssertionError("the connection ended first")


def test_a_request_streams_to_its_end(proxy: wire.Connection) -> None:
    assert isinstance(ready := proxy.receive(), wire.Ready)
    assert ready.limits["max_seq_len"] == LIMITS.max_seq_len
    proxy.send(wire.Generate("7", {"text_input": ["hi"], "max_tokens": [5], "return_log_probs": [True]}))
    deltas = [message for message in collect(proxy, "7") if isinstance(message, wire.Delta)]
    assert [token for delta in deltas for token in delta.token_ids] == [0, 1, 2, 3, 4]
    assert [value for delta in deltas for value in delta.log_probs] == [-0.5] * 5
    assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 "
    assert deltas[-1].finish_reason == "length"
    metrics = deltas[-1].metrics
    assert (metrics["drafted_tokens"], metrics["accepted_tokens"], metrics["block_size"]) == (21, 2, 8)


def test_cancel_ends_a_request(proxy: wire.Connection) -> None:
    proxy.send(wire.Generate("8", {"text_input": ["hi"], "max_tokens": [2000]}))
    proxy.send(wire.Cancel("8"))
    end = collect(proxy, "8")[-1]
    assert isinstance(end, wire.Delta)
    assert end.finish_reason == "cancelled"


def test_the_work_of_a_request_that_fails_is_counted(proxy: wire.Connection) -> None:
    proxy.send(wire.Generate("8", {"text_input": ["hi"], "max_tokens": [2000], "deadline_s": [0.1]}))
    end = collect(proxy, "8")[-1]
    assert isinstance(end, wire.Failed)
    while not isinstance(beat := proxy.receive(), wire.Heartbeat):
        assert beat is not None
    found = {name: value for name, labels, value in beat.samples if not labels}
    assert found["dflash_prompt_tokens_total"] == 1
    assert found["dflash_drafted_tokens_total"] == 7 * found["dflash_cycles_total"] > 0
    assert found["dflash_output_tokens_total"] == 2 * found["dflash_cycles_total"]


def test_too_long_prompt_names_limit_and_value(proxy: wire.Connection) -> None:
    proxy.send(wire.Generate("9", {"text_input": ["w " * LIMITS.max_seq_len], "max_tokens": [1]}))
    (failure,) = collect(proxy, "9")
    assert isinstance(failure, wire.Failed)
    assert failure.code == "INVALID_ARGUMENT"
    assert failure.message.startswith("text_input: got '2048 tokens', expected at most max_seq_len - 1 = 2047")


def test_heartbeats_carry_statistics(proxy: wire.Connection) -> None:
    while not isinstance(message := proxy.receive(), wire.Heartbeat):
        pass
    assert message.stats["pages_free"] == message.stats["pages_total"] > 0
    assert message.stalled_s < 1.0


def test_a_long_request_is_not_a_stall(proxy: wire.Connection) -> None:
    proxy.send(wire.Generate("1", {"text_input": ["hi"], "max_tokens": [2000]}))
    beats = 0
    while beats < 2:
        message = proxy.receive()
        if isinstance(message, wire.Heartbeat):
            beats += 1
            assert message.stats["running"] == 1
            assert message.stalled_s < 0.4


def test_dead_thread_ends_the_process() -> None:
    code = (
        "import threading, time\n"
        "from trtllm_dflash.serving.process_lifetime import exit_on_thread_failure\n"
        "exit_on_thread_failure()\n"
        "threading.Thread(target=lambda: 1 / 0).start()\n"
        "time.sleep(60)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr


def test_merging_keeps_order_and_ends() -> None:
    failed = wire.Failed("b", "INTERNAL", "x")
    merged = merge_deltas(
        [
            wire.Delta("a", "x", [1], [-1.0], [{"token": "x"}]),
            wire.Delta("b", "y", [2]),
            wire.Delta("a", "z", [3], [-2.0], [{"token": "z"}], "stop", {"cycles": 1}),
            failed,
        ]
    )
    whole = wire.Delta("a", "xz", [1, 3], [-1.0, -2.0], [{"token": "x"}, {"token": "z"}], "stop", {"cycles": 1})
    assert merged == [whole, wire.Delta("b", "y", [2]), failed]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot open /srv/models/a/rank0.safetensors now", "cannot open <path> now"),
        ("max_tokens: got 0, expected 1/2 of it", "max_tokens: got 0, expected 1/2 of it"),
    ],
)
def test_errors_do_not_show_paths(text: str, clean: str) -> None:
    assert without_paths(text) == clean


def test_engine_process_leaves_with_its_proxy() -> None:
    """In the middle of its work: end of file is enough, no signal is sent."""
    ours, theirs = socket.socketpair()
    script = Path(__file__).parent / "fake_engine_process.py"
    process = subprocess.Popen([sys.executable, str(script), "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    connection = wire.Connection(ours)
    try:
        assert isinstance(connection.receive(), wire.Ready)
        connection.send(wire.Generate("1", {"text_input": ["hi"], "max_tokens": [2000]}))
        assert collect_first(connection)
        connection.close()
        process.wait(timeout=5)
    finally:
        process.kill()
        process.wait()


def collect_first(connection: wire.Connection) -> wire.Delta:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if isinstance(message := connection.receive(), wire.Delta):
            return message
    raise AssertionError("no output within 10 s")


class _StuckEngine(CountingEngine):
    """Takes in no request until it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        super().__init__(0.002)
        self._let_go = let_go

    def submit(self, *args: object, **options: object) -> str:
        self._let_go.wait(30)
        return super().submit(*args, **options)  # type: ignore[arg-type]


def test_a_request_that_is_never_queued_is_a_stall() -> None:
    ours, theirs = socket.socketpair()
    let_go = threading.Event()
    server = engine_server(_StuckEngine(let_go), wire.Connection(theirs))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    connection = wire.Connection(ours)
    connection.send(wire.Generate("1", {"text_input": ["hi"], "max_tokens": [2]}))
    stalls: list[float] = []
    while not stalls or (stalls[-1] < 0.8 and len(stalls) < 20):
        if isinstance(message := connection.receive(), wire.Heartbeat):
            assert message.stats["running"] + message.stats["waiting"] == 0
            stalls.append(message.stalled_s)
    assert stalls[-1] >= 0.8
    let_go.set()
    collect(connection, "1")
    while not isinstance(message := connection.receive(), wire.Heartbeat):
        pass
    assert message.stalled_s < 0.8
    connection.close()
    thread.join(timeout=5)
    assert not thread.is_alive()

"""Addresses as users type them: taken, or refused at once and in words."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from trtllm_dflash.cli.main import main
from trtllm_dflash.errors import ConfigError
from trtllm_dflash.serving import front_end
from trtllm_dflash.serving.client import TritonClient, TritonHttpError
from trtllm_dflash.serving.front_end import replica_problems
from trtllm_dflash.serving.server_url import ServerUrl, address, reachable, split_url
from trtllm_dflash.serving.triton_install import free_ports


@pytest.mark.parametrize(
    ("url", "parts", "root"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("https://gpu-1.example/v1", ("https", "gpu-1.example", None), "https://gpu-1.example"),
        ("http://[::1]:8000/", ("http", "::1", 8000), "http://[::1]:8000"),
        ("http://my_service", ("http", "my_service", None), "http://my_service"),
    ],
)
def test_taken(url: str, parts: tuple[str, str, int | None], root: str) -> None:
    assert split_url(url) == ServerUrl(*parts)
    assert split_url(url).root == root


BAD = [
    "",
    "localhost:8000",
    "ftp://a:80",
    "http://",
    "http://a:99999",
    "http://a:x",
    "http://[::1",
    "http://a..b:80",
    "http://a b:80",
    "http://ä:80",
]


@pytest.mark.parametrize("url", BAD)
def test_refused(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        TritonClient(url)
    dataset = tmp_path / "d.jsonl"
    dataset.write_text('{"prompt": "x"}\n')
    for words in (
        ["serve", "--openai-port", "0", f"--triton-url={url}"],
        ["bench", f"--url={url}", "--dataset", str(dataset), "--no-chat"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert "expected http://host:port" in err
        assert "fault of the toolkit" not in err


def test_ipv6_addresses_have_brackets() -> None:
    assert address("::1", 8000) == "[::1]:8000"
    assert address("127.0.0.1", 8000) == "127.0.0.1:8000"
    assert [reachable(host) for host in ("::", "0.0.0.0", "", "h")] == ["::1", "127.0.0.1", "127.0.0.1", "h"]


def test_a_host_that_is_not_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"host '192\.0\.2\.1' cannot be listened on"):
        free_ports("192.0.2.1", [0])


def test_silent_replicas_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "ASK_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        problems = replica_problems([url] * 8, "dflash")
    assert [problem.message for problem in problems] == [f"{url}: Triton did not answer within 0.5 s"] * 8
    # One after the other they would take four seconds.
    assert time.monotonic() - begun < 3.0


def test_a_stream_that_is_cut_inside_an_event_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
                connection.sendall(head + b'data: {"text_output": "a"}\n\ndata: {"text_out')
                connection.shutdown(socket.SHUT_WR)
                # A request that nobody has read when the socket closes turns the end into a reset.
                while connection.recv(65536):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        client = TritonClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=10.0)
        events = client.generate_stream("x")
        assert next(events) == {"text_output": "a"}
        with pytest.raises(TritonHttpError, match="connection was lost"):
            next(events)

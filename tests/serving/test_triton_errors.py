"""Triton's own words, as release 24.10 says them, and failed connections: what they mean and what to do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trtllm_dflash.cli.main import main
from trtllm_dflash.serving.client import TritonClient, TritonHttpError, TritonUnreachableError
from trtllm_dflash.serving.triton_errors import load_failure

ANSWERS = [
    (404, "Request for unknown model: 'dflash' is not found", "has no model 'dflash'", "--model-name", 2),
    (
        404,
        "Request for unknown model: 'dflash' has no available versions",
        "is not ready",
        "/v2/models/dflash/ready",
        1,
    ),
    (500, "Stub process 'dflash_0_0' is not healthy.", "has died", "starts it again", 1),
    (
        500,
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        "wrong JSON type",
        "README.md lists the inputs",
        2,
    ),
    (500, "failed to parse the request JSON buffer: Invalid value. at 1", "not JSON", "lists the inputs", 2),
    (
        400,
        "[request id: <id_unknown>] input 'text_input' batch size does not match other inputs for 'dflash'",
        "wrong shape",
        "lists the inputs",
        2,
    ),
    (400, "[request id: <id_unknown>] out of bounds index 0: request has 0 inputs", "has no input", "lists", 2),
    (405, "Method Not Allowed", "not as Triton does", "8000", 1),
    (400, "INVALID_ARGUMENT: max_tokens: got 0, expected 1 or more", "max_tokens: got 0", "lists the inputs", 2),
    (400, "UNAVAILABLE: the engine is restarting", "the engine is restarting", "again in a few seconds", 1),
    (400, "DEADLINE_EXCEEDED: too late", "too late", "longer deadline_s", 1),
    (500, "something new", "HTTP 500: something new", "log names the cause", 1),
]


@contextmanager
def _server(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_an_empty_answer_of_something_else_is_not_called_tritons() -> None:
    with _server(404, b"") as url, pytest.raises(TritonHttpError) as caught:
        TritonClient(url).generate("x")
    assert caught.value.message == f"{url}: something answers there, but not as Triton does (HTTP 404: an empty answer)"


@pytest.mark.parametrize(("status", "text", "message", "hint", "exit_code"), ANSWERS, ids=[one[2] for one in ANSWERS])
def test_an_answer_says_what_it_means(status: int, text: str, message: str, hint: str, exit_code: int) -> None:
    with _server(status, json.dumps({"error": text}).encode()) as url:
        client = TritonClient(url)
        for call in (lambda: client.generate("x"), lambda: list(client.generate_stream("x"))):
            with pytest.raises(TritonHttpError) as caught:
                call()
            error = caught.value
            assert (error.status, error.text, error.exit_code) == (status, text, exit_code)
            assert message in error.message
            assert text in error.message  # for whoever searches for Triton's words
            assert hint in str(error.hint)


def test_a_body_that_is_no_event_is_not_taken_for_a_lost_connection() -> None:
    with _server(405, b"<html>") as url, pytest.raises(TritonHttpError, match="not as Triton does"):
        list(TritonClient(url).generate_stream("x"))


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        client = TritonClient(url)
        with pytest.raises(TritonUnreachableError, match="no Triton server answers: Connection refused") as caught:
            client.generate("x")
        assert "trtllm-dflash serve -m REPOSITORY" in str(caught.value.hint)
        assert not client.ready()


@contextmanager
def _listener(answer: bytes | None) -> Iterator[str]:
    """Sends ``answer`` to whoever connects and closes; None never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        kept: list[socket.socket] = []

        def serve() -> None:
            connection, _ = server.accept()
            kept.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                # A request that nobody has read when the socket closes turns the end into a reset.
                while connection.recv(65536):
                    pass
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(timeout=10)
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (b"\x00\x00\x12\x04\x00\n", "does not speak HTTP", "not on the ports of gRPC"),
        (b"", "the connection was lost", "send the request again"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "the connection was lost", "send the request again"),
        (None, "did not answer within 0.3 s", "overloaded"),
    ],
    ids=["grpc", "closed", "cut", "silent"],
)
def test_no_usable_answer(answer: bytes | None, message: str, hint: str) -> None:
    with _listener(answer) as url, pytest.raises(TritonUnreachableError, match=message) as caught:
        TritonClient(url, timeout_s=0.3).generate("x")
    assert hint in str(caught.value.hint)


def test_bench_on_the_grpc_port_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "x"}\n')
    with _listener(b"\x00\x00\x12\x04\x00\n") as url, pytest.raises(SystemExit) as ended:
        main(["bench", "--url", url, "--dataset", str(dataset)])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert "does not speak HTTP" in err
    assert "hint: HTTP is on serve's --http-port (8000), not on the ports of gRPC" in err


REASON = "engines/config.json: SHA-256 is 1, expected 2 (hint: it was rebuilt: run `trtllm-dflash deploy` again)"
LOG = (
    "E1130 model_lifecycle.cc:642] \"failed to load 'dflash' version 1: Internal: TritonModelException: "
    + REASON
    + '\\n\\nAt:\\n  /r/dflash/1/model.py(75): initialize\\n"\n'
)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (LOG, "engines/config.json: SHA-256 is 1, expected 2", "run `trtllm-dflash deploy` again"),
        ("Internal: ModuleNotFoundError: No module named 'numpy'\\n\\nAt:", "has no module 'numpy'", "numpy<2"),
        ("Internal: ModuleNotFoundError: No module named 'wire'", "has no module 'wire'", "deploy --force"),
        ("failed to load 'dflash', failed to poll from model repository", "config.pbtxt", "deploy --force"),
        ("bind: Address already in use", "a port was taken", "--http-port"),
        ("Unable to create shared memory region: No space left", "no shared memory", "--shm-size=1g"),
    ],
)
def test_a_failed_load_says_what_to_do(text: str, message: str, hint: str) -> None:
    meaning = load_failure(text)
    assert meaning is not None
    assert message in meaning.message
    assert hint in meaning.hint
    assert "(hint:" not in meaning.message


def test_an_unknown_failure_is_left_as_it_is() -> None:
    assert load_failure("I1130 all is well") is None

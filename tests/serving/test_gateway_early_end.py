"""Requests that end before the engine says so: at the end of a drain, and at their own deadline."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")
pytest.importorskip("aiohttp", reason="pip install 'trtllm-dflash[openai]'")

from fake_triton import Api, FakeTriton, event, last, running_gateway, wait_until

from trtllm_dflash.serving.gateway.__main__ import DrainingServer, server_config
from trtllm_dflash.serving.gateway.app import Gateway
from trtllm_dflash.serving.gateway.settings import GatewaySettings
from trtllm_dflash.serving.triton_install import free_ports

ENDLESS = [event("a", [1]), 60.0, last("b", [2])]


@contextmanager
def draining_gateway(url: str, drain_timeout_s: float) -> Iterator[tuple[Api, DrainingServer, threading.Thread]]:
    """The front end as its own process would run it, in a thread."""
    (port,) = free_ports("127.0.0.1", [0])
    gateway = Gateway(GatewaySettings(triton_urls=(url,), port=port, drain_timeout_s=drain_timeout_s))
    server = DrainingServer(server_config(gateway), gateway)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Api(port, gateway), server, thread
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def logged_statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.args[1] for record in caplog.records if record.name == "trtllm_dflash.gateway" and record.args]  # type: ignore[index,misc]


def test_what_the_drain_does_not_finish_ends_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTriton() as triton, draining_gateway(triton.url, 0.3) as (api, server, thread), caplog.at_level("INFO"):
        triton.script = list(ENDLESS)
        assert api.gateway is not None
        gateway = api.gateway
        with ThreadPoolExecutor(4) as pool, socket.create_connection(("127.0.0.1", api.port), timeout=10) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            asked = [pool.submit(api.chat, stream=stream) for stream in (True, True, False, False)]
            wait_until(lambda: gateway.in_flight == 5)
            time.sleep(0.1)  # the first token of each stream is out
            server.handle_exit(signal.SIGTERM, None)
            answers = [one.result(timeout=10) for one in asked]
            assert half.recv(100).startswith(b"HTTP/1.1 503")
        thread.join(5)
        assert not thread.is_alive()
        wait_until(lambda: len(triton.stopped) == 4)
    for status, text, _ in answers[:2]:
        assert status == 200
        *_, error, done = [line for line in text.split("\n\n") if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
    for status, body, headers in answers[2:]:
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "shutting_down", "5")
    assert logged_statuses(caplog) == [503] * 5
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("uvicorn")]


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTriton() as triton, draining_gateway(triton.url, 0.2) as (api, server, thread), caplog.at_level("INFO"):
        triton.script = [event("x" * 100_000, [1])] * 200 + [60.0]
        connection = api.connection()
        body = {"model": "dflash", "prompt": "x", "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert api.gateway is not None
        gateway = api.gateway
        wait_until(lambda: gateway.in_flight == 1)
        time.sleep(0.3)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(6)
        assert not thread.is_alive()
        connection.close()
    assert logged_statuses(caplog) == [503]


@pytest.mark.parametrize("script", [list(ENDLESS), [60.0]], ids=["running", "waiting"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_holds_while_the_engine_is_silent(stream: bool, script: list[object]) -> None:
    with FakeTriton() as triton, running_gateway(triton.url) as api:
        triton.script = script
        began = time.monotonic()
        status, answer, _ = api.chat(deadline_s=0.3, stream=stream)
        assert 0.3 <= time.monotonic() - began < 5.0
        if stream and len(script) > 1:
            *_, text, done = [line for line in answer.split("\n\n") if line]
            assert (status, done) == (200, "data: [DONE]")
            answer = json.loads(text.removeprefix("data: "))
        else:
            assert status == 504
        assert (answer["error"]["code"], answer["error"]["param"]) == ("deadline_exceeded", "deadline_s")
        wait_until(lambda: triton.stopped == [triton.inputs[0]["id"]])
        gateway = api.gateway
        assert gateway is not None
        wait_until(lambda: gateway.in_flight == 0)


def test_a_request_that_is_in_time_is_left_alone() -> None:
    with FakeTriton() as triton, running_gateway(triton.url) as api:
        assert api.chat(deadline_s=0.3)[1]["choices"][0]["message"]["content"] == "Hello."
        triton.script = [event("a", [1]), 0.8, last("b", [2])]
        assert api.chat()[0] == 200

"""A scripted Triton and a gateway in threads, for tests of the front end alone."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from aiohttp import web

from trtllm_dflash.serving.gateway.app import Gateway
from trtllm_dflash.serving.gateway.settings import GatewaySettings
from trtllm_dflash.serving.triton_install import free_ports

METRICS = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "cycles": 2,
    "drafted_tokens": 14,
    "accepted_tokens": 2,
    "accepted_histogram": [1, 0, 1, 0, 0, 0, 0, 0],
    "acceptance_length": 2.0,
    "block_size": 8,
}


def event(text: str, tokens: list[int], **more: object) -> dict[str, object]:
    """An event as Triton writes it: a list of one as the bare value, an empty list not at all."""
    ids: dict[str, object] = {"token_ids": tokens[0] if len(tokens) == 1 else tokens} if tokens else {}
    return {"model_name": "dflash", "text_output": text, **ids, **more}


def last(text: str, tokens: list[int], reason: str = "stop", **more: object) -> dict[str, object]:
    return event(text, tokens, finish_reason=reason, request_metrics=json.dumps(METRICS), **more)


HELLO = [event("Hel", [7]), event("lo", [8, 9]), last(".", [2])]


class FakeTriton:
    """One server. ``script`` are the events of the next streams; floats are pauses in seconds.

    Attributes:
        inputs: what each stream was asked. stopped: ids that were stopped. dropped: streams whose client left.
        status, body: answer of a stream instead of events. facts: the health answer.
    """

    def __init__(self) -> None:
        self.script: list[object] = list(HELLO)
        self.inputs: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.dropped = 0
        self.refusal: tuple[int, str] | None = None
        self.facts: dict[str, Any] = {
            "state": "ready",
            "in_flight": 0,
            "limits": {"max_batch_size": 4, "max_seq_len": 99},
        }
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up = threading.Event()

    def __enter__(self) -> FakeTriton:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=8 << 20)
        app.router.add_post("/v2/models/dflash/generate", self._generate)
        app.router.add_post("/v2/models/dflash/generate_stream", self._stream)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._loop.run_until_complete(runner.setup())
        (port,) = free_ports("127.0.0.1", [0])
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", port).start())
        self.url = f"http://127.0.0.1:{port}"
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("stop"):
            self.stopped.append(asked["id"])
            return web.json_response({"text_output": ""})
        return web.json_response({"text_output": json.dumps(self.facts)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.inputs.append(await request.json())
        if self.refusal is not None:
            status, text = self.refusal
            return web.Response(status=status, text=f"data: {json.dumps({'error': text})}\n\n")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            for item in self.script:
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    await response.write(f"data: {json.dumps(item)}\n\n".encode())
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise
        return response


@contextmanager
def running_gateway(*urls: str, **settings: Any) -> Iterator[Api]:
    """A gateway in a thread, in front of ``urls``."""
    (port,) = free_ports("127.0.0.1", [0])
    gateway = Gateway(GatewaySettings(triton_urls=urls, port=port, **settings))
    config = uvicorn.Config(gateway.app, host="127.0.0.1", port=port, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Api(port, gateway)
    finally:
        server.should_exit = True
        thread.join(10)


class Api:
    """A client of one gateway."""

    def __init__(self, port: int, gateway: Gateway | None = None) -> None:
        self.port = port
        self.gateway = gateway

    def connection(self, timeout_s: float = 20.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, parsed body or text, headers). ``body``: bytes as they are, or a document."""
        connection = self.connection()
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, json.loads(text) if "json" in found.get("content-type", "") else text, found

    def chat(self, content: str = "hi", **more: object) -> tuple[int, Any, dict[str, str]]:
        body = {"model": "dflash", "messages": [{"role": "user", "content": content}], **more}
        return self.ask("POST", "/v1/chat/completions", body)

    def complete(self, prompt: object = "hi", **more: object) -> tuple[int, Any, dict[str, str]]:
        return self.ask("POST", "/v1/completions", {"model": "dflash", "prompt": prompt, **more})

    def chunks(self, **more: object) -> list[Any]:
        """The chunks of a streamed chat; the end mark is checked and taken off."""
        status, text, headers = self.chat(stream=True, **more)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line for line in text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def open_stream(self, **more: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A streamed chat that stays open; the caller closes the connection."""
        connection = self.connection()
        body = {"model": "dflash", "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        return connection, connection.getresponse()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.02)

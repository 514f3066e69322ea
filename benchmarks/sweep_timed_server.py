"""An OpenAI endpoint that only sleeps: two load generators can be compared on it on any machine, however busy."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FIRST_S, GAP_S, EVENTS, TOKENS = 0.3, 0.15, 8, 24
FACTS = f"sleeps {FIRST_S} s, then sends {EVENTS} events {GAP_S} s apart, {TOKENS} tokens in all"


@contextmanager
def timed_server() -> Iterator[str]:
    """The URL of the server, which runs until the block is left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "timed"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        # The load behind the last measured request is cut off in the middle.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stream()

    def _stream(self) -> None:
        for number in range(EVENTS):
            time.sleep(GAP_S if number else FIRST_S)
            self._event([{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
        self._event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        self._event([], usage={"prompt_tokens": 10, "completion_tokens": TOKENS, "total_tokens": 10 + TOKENS})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, choices: list[dict[str, object]], **more: object) -> None:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "timed"}
        self.wfile.write(f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode())
        self.wfile.flush()

"""HTTP servers that speak as Triton and as an OpenAI endpoint do, backed by an open LLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trtllm_dflash import LLM, SamplingParams


@contextmanager
def served(llm: LLM, kind: str) -> Iterator[str]:
    """The URL of a server of ``kind`` (``triton`` or ``openai``) that generates with ``llm``."""
    handler = type("Handler", (_Triton if kind == "triton" else _OpenAI,), {"llm": llm})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    llm: LLM

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def event(self, event: object) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()


class _Triton(_Handler):
    def do_GET(self) -> None:
        self.answer({}, 200 if self.path.startswith("/v2/health") else 404)

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/v2/repository/index":
            self.answer([{"name": "dflash", "state": "READY"}])
            return
        if self.path == "/v2/models/dflash/generate" and body.get("control") == "health":
            facts = {"state": "ready", "limits": asdict(self.llm.limits), "max_queue": 256}
            self.answer({"text_output": json.dumps(facts)})
            return
        if self.path != "/v2/models/dflash/generate_stream":
            self.answer({"error": f"Request for unknown model: {self.path.split('/')[3]!r} is not found"}, 404)
            return
        self.begin_stream()

        def show(_: int, chunk: Any) -> None:
            event: dict[str, Any] = {"text_output": chunk.text}
            if chunk.token_ids:
                ids = list(chunk.token_ids)
                event["token_ids"] = ids if len(ids) > 1 else ids[0]
            if chunk.metrics is not None:
                metrics = {**asdict(chunk.metrics), "warnings": chunk.warnings}
                event |= {"finish_reason": chunk.finish_reason, "request_metrics": json.dumps(metrics)}
            self.event(event)

        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"])
        self.llm.generate([body["input_ids"]], params, on_chunk=show)


class _OpenAI(_Handler):
    def chunk(self, choices: list[Any], **more: Any) -> None:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        self.event({**head, "choices": choices, **more})

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"object": "list", "data": [{"id": "tiny"}]})
        else:
            self.answer({}, 404)

    def do_POST(self) -> None:
        body = self.body()
        assert self.path == "/v1/chat/completions"
        assert body["model"] == "tiny"
        if body["max_tokens"] > 100:
            self.answer({"error": {"message": "max_tokens is too large"}}, 400)
            return
        self.begin_stream()
        self.chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

        def show(_: int, chunk: Any) -> None:
            if chunk.text:
                self.chunk([{"index": 0, "delta": {"content": chunk.text}, "finish_reason": chunk.finish_reason}])

        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"])
        metrics = self.llm.generate([body["messages"]], params, on_chunk=show)[0].metrics
        usage = {"prompt_tokens": metrics.prompt_tokens, "completion_tokens": metrics.completion_tokens}
        speculative = {
            "num_spec_steps": metrics.cycles,
            "num_draft_tokens": metrics.drafted_tokens,
            "num_accepted_draft_tokens": metrics.accepted_tokens,
            "mean_acceptance_length": metrics.acceptance_length,
            "draft_acceptance_rate": metrics.accepted_tokens / max(1, metrics.drafted_tokens),
            "acceptance_histogram": list(metrics.accepted_histogram),
        }
        self.chunk([], usage=usage, metrics={"speculative_decoding": speculative})
        self.event("[DONE]")

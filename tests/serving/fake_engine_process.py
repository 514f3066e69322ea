"""An engine process for protocol tests: the real server and messages around a generator that counts words.

Run like ``trtllm_dflash.serving.engine_process``. It exists so that faults (slow loads, long outputs) cost no model
time.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk, RequestMetrics, TokenLogprobs
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.engine_server import EngineServer
from trtllm_dflash.serving.log_prob_details import TokenBytes
from trtllm_dflash.serving.process_lifetime import Leash
from trtllm_dflash.serving.request_fields import ChatRequest

LIMITS = BuildLimits(max_batch_size=16, max_seq_len=2048, max_num_tokens=2048, block_size=8, page_tokens=32)
PAGES = 64
VOCAB_SIZE = 1000
EOS = (2,)


@dataclass
class _Request:
    id: str
    params: SamplingParams
    on_chunk: Callable[[OutputChunk], None]
    priority: int = 0
    deadline_s: float | None = None
    produced: int = 0
    cancelled: bool = False
    began: float = field(default_factory=time.monotonic)


class CountingEngine:
    """Token n of a request is the word ``n``; a step gives two tokens to each running request, one page per request."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        self._counters = {"requests_finished": 0, "requests_cancelled": 0, "output_tokens": 0}
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        on_chunk: Callable[[OutputChunk], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        max_tokens_must_fit: bool = False,
    ) -> str:
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        if tokens + 1 > LIMITS.max_seq_len:
            raise RequestError(
                "prompt", f"{tokens} tokens", f"at most max_seq_len - 1 = {LIMITS.max_seq_len - 1} tokens"
            )
        assert request_id
        with self._lock:
            self._requests[request_id] = _Request(request_id, params, on_chunk, priority, deadline_s)
        return request_id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].cancelled = True

    def stats(self) -> EngineStats:
        with self._lock:
            running = min(len(self._requests), LIMITS.max_batch_size)
            waiting = len(self._requests) - running
            return EngineStats(PAGES, PAGES - running, running, 0, running, waiting, dict(self._counters))

    def close(self) -> None:
        pass

    def _loop(self) -> None:
        while True:
            time.sleep(self._step_s)
            with self._lock:
                batch = list(self._requests.values())[: LIMITS.max_batch_size]
                batch += [request for request in self._requests.values() if request.cancelled and request not in batch]
            for request in batch:
                self._step(request)

    def _step(self, request: _Request) -> None:
        limit = request.params.max_tokens or LIMITS.max_seq_len
        late = request.deadline_s is not None and time.monotonic() - request.began > request.deadline_s
        tokens = [] if request.cancelled or late else list(range(request.produced, min(request.produced + 2, limit)))
        request.produced += len(tokens)
        reason = (
            "error" if late else "cancelled" if request.cancelled else "length" if request.produced >= limit else None
        )
        if reason:
            with self._lock:
                del self._requests[request.id]
                self._counters["requests_cancelled" if request.cancelled else "requests_finished"] += 1
                self._counters["output_tokens"] += request.produced
        cycles = (request.produced + 1) // 2
        accepted = request.produced - cycles
        seconds = time.monotonic() - request.began
        histogram = (cycles - accepted, accepted, 0, 0, 0, 0, 0, 0)
        metrics = RequestMetrics(
            1,
            request.produced,
            cycles,
            7 * cycles,
            accepted,
            histogram,
            request.produced / max(cycles, 1),
            0,
            0,
            seconds,
        )
        wanted = request.params.logprobs
        top = tuple((token, -0.5 - token) for token in range(wanted or 0))
        log_probs = tuple(TokenLogprobs(token, -0.5, top) for token in tokens) if wanted is not None else ()
        request.on_chunk(
            OutputChunk(
                request.id,
                text="".join(f"{token} " for token in tokens),
                token_ids=tuple(tokens),
                logprobs=log_probs,
                finish_reason=reason,  # type: ignore[arg-type]
                error="deadline_s: the deadline of the request has passed" if late else None,
                error_kind="deadline" if late else None,
                metrics=metrics if reason else None,
            )
        )


def render_chat(request: ChatRequest) -> list[int]:
    """One token per word of the messages; a template that knows two roles."""
    for message in request.messages:
        if message.get("role") not in ("user", "assistant"):
            raise RequestError("chat_messages", message.get("role"), "messages of user and assistant")
    return [5 for message in request.messages for _ in str(message.get("content")).split()] or [5]


def engine_server(engine: CountingEngine, connection: wire.Connection) -> EngineServer:
    """The real server around the counting engine."""
    words = {str(number): number for number in range(VOCAB_SIZE)}
    return EngineServer(
        engine,
        connection,
        limits=LIMITS,
        eos_token_ids=EOS,
        vocab_size=VOCAB_SIZE,
        render_chat=render_chat,
        token_bytes=TokenBytes(Tokenizer(WordLevel(words, unk_token="0"))),
        info={"backend": "counting"},
        speculates=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--hold", type=Path, help="While this file exists, loading waits.")
    parser.add_argument("--needs", type=Path, help="Without this file the process ends instead of loading.")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    while arguments.hold and arguments.hold.exists():
        time.sleep(0.05)
    if arguments.needs and not arguments.needs.exists():
        sys.exit(f"{arguments.needs}: no such file")
    connection = Leash(socket.socket(fileno=arguments.fd))
    engine = CountingEngine(arguments.step_s)
    engine_server(engine, connection).run()


if __name__ == "__main__":
    main()

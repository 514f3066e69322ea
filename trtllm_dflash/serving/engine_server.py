"""Answers the proxy's messages with an ``LLM``: requests in, merged deltas, errors and heartbeats out."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import QueueFullError, RequestError
from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.request_fields import parse_request

HEARTBEAT_S = 0.5
_DRAIN_POLL_S = 0.02
_FLUSH_S = 5.0
_log = logging.getLogger(__name__)
# gRPC's word for a passed deadline is not among Triton's.
_CODES: dict[str | None, str] = {"deadline": "UNAVAILABLE", "request": "INVALID_ARGUMENT"}
_SHUTTING_DOWN = "the engine is shutting down; send the request again"
_PATH = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+[\w.@+-]*")


class ChunkCallback(Protocol):
    def __call__(self, chunk: OutputChunk) -> None: ...


class Engine(Protocol):
    """What this room needs of ``trtllm_dflash.runtime.llm.LLM``."""

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        on_chunk: ChunkCallback,
        *,
        request_id: str | None = None,
    ) -> str: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineServer:
    """One connection to one proxy.

    Args:
        engine: the loaded engine. limits, eos_token_ids, vocab_size: facts of its directory, for validation.
        connection: the connected socket; the server lives exactly as long as it.
    """

    def __init__(
        self,
        engine: Engine,
        connection: wire.Connection,
        *,
        limits: BuildLimits,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._limits = limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._outgoing: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._progressed_at = time.monotonic()
        self._draining = threading.Event()
        self._cut = threading.Event()
        self._writer = threading.Thread(target=self._write, name="wire-writer", daemon=True)

    def run(self) -> None:
        """Serve until the proxy closes the connection or asks for shutdown."""
        threads = [
            self._writer,
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]
        self._outgoing.put(wire.Ready(wire.PROTOCOL_VERSION, os.getpid(), asdict(self._limits)))
        for thread in threads:
            thread.start()
        try:
            while (message := self._connection.receive()) is not None and not isinstance(message, wire.Shutdown):
                if isinstance(message, wire.Generate):
                    self._submit(message)
                elif isinstance(message, wire.Cancel):
                    self._engine.cancel(message.id)
                else:
                    raise wire.WireError(f"unexpected {type(message).__name__} from the proxy")
        finally:
            self._closed.set()
            self._outgoing.put(None)

    def drain(self, deadline_s: float) -> None:
        """Refuse new requests, let the others finish for ``deadline_s`` seconds, fail the rest, and end ``run``.

        Every request gets its last message before the connection closes.
        """
        _log.info("draining: new requests are refused, running ones have %g s", deadline_s)
        self._draining.set()
        give_up_at = time.monotonic() + deadline_s
        while (stats := self._engine.stats()).running + stats.waiting and time.monotonic() < give_up_at:
            time.sleep(_DRAIN_POLL_S)
        self._cut.set()
        # What is unfinished ends now, as cancelled, which `_on_chunk` reports as an error.
        self._engine.close()
        self._closed.set()
        self._outgoing.put(None)
        self._writer.join(timeout=_FLUSH_S)
        self._connection.close()

    def _submit(self, message: wire.Generate) -> None:
        if self._draining.is_set():
            self._outgoing.put(wire.Failed(message.id, "UNAVAILABLE", _SHUTTING_DOWN))
            return
        try:
            request = parse_request(message.fields, eos_token_ids=self._eos_token_ids, vocab_size=self._vocab_size)
            if request.echo:
                self._outgoing.put(wire.Delta(message.id, text=request.echo))
            self._engine.submit(request.prompt, request.params, self._on_chunk, request_id=message.id)
        except RequestError as error:
            self._outgoing.put(wire.Failed(message.id, "INVALID_ARGUMENT", _in_tensor_names(error)))
        except QueueFullError as error:
            self._outgoing.put(wire.Failed(message.id, "UNAVAILABLE", error.message))
        except Exception as error:
            if self._draining.is_set():
                self._outgoing.put(wire.Failed(message.id, "UNAVAILABLE", _SHUTTING_DOWN))
                return
            _log.exception("request %s could not be queued", message.id)
            reason = f"the engine could not queue this request ({type(error).__name__}); see the server's log"
            self._outgoing.put(wire.Failed(message.id, "INTERNAL", reason))

    def _on_chunk(self, chunk: OutputChunk) -> None:
        self._progressed_at = time.monotonic()
        if chunk.finish_reason == "error":
            _log.error("request %s failed: %s", chunk.request_id, chunk.error)
            reason = without_paths(chunk.error or "the engine failed on this request; see the server's log")
            code = _CODES.get(chunk.error_kind, "INTERNAL")
            self._outgoing.put(wire.Failed(chunk.request_id, code, reason))
            return
        if chunk.finish_reason == "cancelled" and self._cut.is_set():
            self._outgoing.put(wire.Failed(chunk.request_id, "UNAVAILABLE", _SHUTTING_DOWN))
            return
        metrics = chunk.metrics
        self._outgoing.put(
            wire.Delta(
                chunk.request_id,
                text=chunk.text,
                token_ids=list(chunk.token_ids),
                log_probs=[entry.logprob for entry in chunk.logprobs],
                finish_reason=chunk.finish_reason,
                drafted_tokens=metrics.drafted_tokens if metrics else 0,
                accepted_tokens=metrics.accepted_tokens if metrics else 0,
            )
        )

    def _write(self) -> None:
        """The only thread that writes to the socket; joins what has queued up for a request into one message."""
        while True:
            batch = [self._outgoing.get()]
            while not self._outgoing.empty():
                batch.append(self._outgoing.get())
            try:
                for message in merge_deltas([item for item in batch if item is not None]):
                    self._connection.send(message)
            except OSError:
                self._connection.close()
                return
            if None in batch:
                return

    def _beat(self) -> None:
        counted = -1
        while not self._closed.wait(HEARTBEAT_S):
            stats = self._engine.stats()
            now = time.monotonic()
            # Counters may only move when a request ends; chunks are the progress of a running one.
            total = sum(stats.counters.values())
            if total != counted or stats.running + stats.waiting == 0:
                counted, self._progressed_at = total, now
            stalled_s = max(0.0, now - self._progressed_at)
            facts = {
                name: int(getattr(stats, name))
                for name in ("pages_total", "pages_free", "pages_used", "pages_cached", "running", "waiting")
            }
            self._outgoing.put(wire.Heartbeat({**facts, **stats.counters}, round(stalled_s, 3)))


def _in_tensor_names(error: RequestError) -> str:
    """The error's text with the field called as the client knows it."""
    field = {"prompt": "text_input", "stop": "stop_words", "logprobs": "return_log_probs"}.get(error.field, error.field)
    return without_paths(f"{field}: got {error.value!r}, expected {error.allowed}")


def merge_deltas(messages: Sequence[wire.Message]) -> list[wire.Message]:
    """Join the deltas of one request into its first one's place; other messages keep their order after them."""
    merged: list[wire.Message] = []
    place: dict[str, int] = {}
    for message in messages:
        if isinstance(message, wire.Delta) and message.id in place:
            index = place[message.id]
            before = merged[index]
            assert isinstance(before, wire.Delta)
            merged[index] = wire.Delta(
                message.id,
                text=before.text + message.text,
                token_ids=before.token_ids + message.token_ids,
                log_probs=before.log_probs + message.log_probs,
                finish_reason=message.finish_reason,
                drafted_tokens=message.drafted_tokens,
                accepted_tokens=message.accepted_tokens,
            )
            continue
        if isinstance(message, wire.Delta):
            place[message.id] = len(merged)
        merged.append(message)
    return merged


def without_paths(text: str) -> str:
    """``text`` with absolute file paths taken out: clients must not learn the server's layout."""
    return _PATH.sub("<path>", text)

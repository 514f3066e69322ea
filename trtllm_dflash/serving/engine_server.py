"""Answers the proxy's messages with an ``LLM``: requests in, merged deltas, errors and heartbeats out."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import QueueFullError, RequestError
from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.engine_metrics import EngineMetrics
from trtllm_dflash.serving.log_prob_details import TokenBytes
from trtllm_dflash.serving.path_redaction import without_paths
from trtllm_dflash.serving.request_fields import ChatRequest, parse_request

HEARTBEAT_S = 0.5
MAX_ECHOED_CHARACTERS = 200
_DRAIN_POLL_S = 0.02
_FLUSH_S = 5.0
_log = logging.getLogger(__name__)
_CODES: dict[str | None, str] = {"deadline": "DEADLINE_EXCEEDED", "request": "INVALID_ARGUMENT"}
# The runtime's names of fields → the inputs that they came from.
_INPUT_NAMES = {
    "prompt": "text_input",
    "stop": "stop_words",
    "logprobs": "return_log_probs",
    "structured_output": "guided_decoding_guide",
}
_SHUTTING_DOWN = "the engine is shutting down; send the request again"


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
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        max_tokens_must_fit: bool = False,
    ) -> str: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineServer:
    """One connection to one proxy.

    Args:
        engine: the loaded engine. limits, eos_token_ids, vocab_size: facts of its directory, for validation.
        connection: the connected socket; the server lives exactly as long as it.
        render_chat: chat messages to token ids. token_bytes: the target's tokens, for log probability details.
        info: labels that say what runs, for the metrics. speculates: whether cycles draft.
    """

    def __init__(
        self,
        engine: Engine,
        connection: wire.Connection,
        *,
        limits: BuildLimits,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        render_chat: Callable[[ChatRequest], list[int]],
        token_bytes: TokenBytes,
        info: Mapping[str, str],
        speculates: bool,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._limits = limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._render_chat = render_chat
        self._token_bytes = token_bytes
        self._metrics = EngineMetrics(info, speculates=speculates)
        # Engine id → what the client calls the request, and whether it wants log probability details.
        self._known: dict[str, tuple[str, bool]] = {}
        self._outgoing: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._progressed_at = time.monotonic()
        # Since when the reader has been busy with one message; None while it waits for the next.
        self._handling_since: float | None = None
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
                self._handling_since = time.monotonic()
                if isinstance(message, wire.Generate):
                    self._submit(message)
                elif isinstance(message, wire.Cancel):
                    self._engine.cancel(message.id)
                else:
                    raise wire.WireError(f"unexpected {type(message).__name__} from the proxy")
                self._handling_since = None
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
            self._refuse(message, "UNAVAILABLE", _SHUTTING_DOWN)
            return
        try:
            request = parse_request(message.fields, eos_token_ids=self._eos_token_ids, vocab_size=self._vocab_size)
            prompt = request.prompt
            if isinstance(prompt, ChatRequest):
                prompt = self._render_chat(prompt)
            self._known[message.id] = (message.client_id, request.log_prob_details)
            if request.echo:
                self._outgoing.put(wire.Delta(message.id, text=request.echo))
            self._engine.submit(
                prompt,
                request.params,
                self._on_chunk,
                request_id=message.id,
                priority=request.priority,
                deadline_s=request.deadline_s,
                cache_salt=request.cache_salt,
                max_tokens_must_fit=request.max_tokens_must_fit,
            )
        except RequestError as error:
            self._refuse(message, "INVALID_ARGUMENT", _in_tensor_names(error))
        except QueueFullError as error:
            self._refuse(message, "UNAVAILABLE", error.message)
        except Exception as error:
            if self._draining.is_set():
                self._refuse(message, "UNAVAILABLE", _SHUTTING_DOWN)
                return
            _log.exception("request %s could not be queued", message.id)
            reason = f"the engine could not queue this request ({type(error).__name__}); see the server's log"
            self._refuse(message, "INTERNAL", reason)

    def _refuse(self, message: wire.Generate, code: str, reason: str) -> None:
        self._known.pop(message.id, None)
        self._metrics.refused(code)
        self._outgoing.put(wire.Failed(message.id, code, reason))
        _log.info("request %s refused: %s: %s", message.client_id or message.id, code, reason)

    def _fail(self, chunk: OutputChunk, code: str, reason: str, *, counted: bool) -> None:
        self._metrics.failed(chunk.request_id, code, chunk if counted else None)
        self._outgoing.put(wire.Failed(chunk.request_id, code, reason))

    def _on_chunk(self, chunk: OutputChunk) -> None:
        """On the engine thread: note, convert, queue; never write."""
        self._progressed_at = time.monotonic()
        client_id, wants_details = self._known.get(chunk.request_id, ("", False))
        counted = client_id != wire.CANARY_ID
        if chunk.finish_reason is not None:
            self._known.pop(chunk.request_id, None)
        if chunk.finish_reason is not None and counted:
            name = client_id or chunk.request_id
            _log.info("request %s ended", name, extra={"request": _log_facts(name, chunk)})
        if chunk.finish_reason == "error":
            _log.error("request %s failed: %s", client_id or chunk.request_id, chunk.error)
            reason = without_paths(chunk.error or "the engine failed on this request; see the server's log")
            if chunk.error_kind == "request":
                reason = _with_input_name(reason)
            code = _CODES.get(chunk.error_kind, "INTERNAL")
            self._fail(chunk, code, reason, counted=counted)
            return
        if chunk.finish_reason == "cancelled" and self._cut.is_set():
            self._fail(chunk, "UNAVAILABLE", _SHUTTING_DOWN, counted=counted)
            return
        if counted:
            self._metrics.delivered(chunk)
        metrics: dict[str, object] = {}
        if chunk.metrics is not None:
            # One entry for each count of kept drafts, 0 to S - 1.
            metrics = {**asdict(chunk.metrics), "block_size": len(chunk.metrics.accepted_histogram)}
            if chunk.warnings:
                metrics["warnings"] = list(chunk.warnings)
        self._outgoing.put(
            wire.Delta(
                chunk.request_id,
                text=chunk.text,
                token_ids=list(chunk.token_ids),
                log_probs=[entry.logprob for entry in chunk.logprobs],
                log_prob_details=self._token_bytes.details(chunk.logprobs) if wants_details else [],
                finish_reason=chunk.finish_reason,
                metrics=metrics,
            )
        )

    def _write(self) -> None:
        """The only thread that writes to the socket; joins what has queued up for a request into one message."""
        while True:
            batch = [self._outgoing.get()]
            while not self._outgoing.empty():
                batch.append(self._outgoing.get())
            try:
                self._connection.send_all(merge_deltas([item for item in batch if item is not None]))
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
            # A request that the proxy has sent and that is not queued yet is in no counter of the engine, and what is
            # behind it (cancellations too) waits in the socket.
            if (since := self._handling_since) is not None:
                stalled_s = max(stalled_s, now - since)
            facts = {
                name: int(getattr(stats, name))
                for name in ("pages_total", "pages_free", "pages_used", "pages_cached", "running", "waiting")
            }
            samples = self._metrics.samples(stats)
            self._outgoing.put(wire.Heartbeat({**facts, **stats.counters}, round(stalled_s, 3), samples))


def _in_tensor_names(error: RequestError) -> str:
    """The error's text with the field called as the client knows it."""
    field = _INPUT_NAMES.get(error.field, error.field)
    value = repr(error.value)
    if len(value) > MAX_ECHOED_CHARACTERS:
        value = f"{value[:MAX_ECHOED_CHARACTERS]}… ({len(value)} characters)"
    return without_paths(f"{field}: got {value}, expected {error.allowed}")


def _with_input_name(reason: str) -> str:
    """A reason that begins with a field, with the field called as the client knows it."""
    field, colon, rest = reason.partition(":")
    return f"{_INPUT_NAMES.get(field, field)}{colon}{rest}"


def _log_facts(name: str, chunk: OutputChunk) -> dict[str, object]:
    """What the log says of an ended request."""
    metrics = chunk.metrics
    if metrics is None:
        return {"request_id": name, "finish_reason": chunk.finish_reason}
    return {
        "request_id": name,
        "finish_reason": chunk.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "acceptance_length": metrics.acceptance_length and round(metrics.acceptance_length, 3),
        "queue_s": round(metrics.queue_s, 4),
        "first_token_s": round(metrics.time_to_first_token_s, 4),
        "elapsed_s": round(metrics.elapsed_s, 4),
    }


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
                log_prob_details=before.log_prob_details + message.log_prob_details,
                finish_reason=message.finish_reason,
                metrics=message.metrics,
            )
            continue
        if isinstance(message, wire.Delta):
            place[message.id] = len(merged)
        merged.append(message)
    return merged

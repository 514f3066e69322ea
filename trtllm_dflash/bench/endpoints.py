"""Where load goes: an ``LLM`` in this process. One call runs one request and fills its record."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from trtllm_dflash.bench.records import RequestRecord, digest_of
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError

if TYPE_CHECKING:
    from trtllm_dflash.runtime.llm import LLM
    from trtllm_dflash.runtime.outputs import OutputChunk


class Endpoint(Protocol):
    """Runs requests, any number at a time from any thread."""

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        """Run one request to its end and fill ``record``; failures go into ``record.error``.

        Args:
            prompt: token ids, text or chat messages, as the endpoint takes them.
            stop: once set, the request is cancelled and the call returns soon.
        """

    def stop_all(self) -> None:
        """Cancel every request in flight; ``stop`` of each of them is set."""


class InProcess:
    """An open ``LLM``. Prompts are token ids, so that tokenising is no part of a measurement."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._live: set[str] = set()
        self._lock = threading.Lock()

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        """See :class:`Endpoint`."""
        done = threading.Event()
        tokens: list[int] = []

        def on_chunk(chunk: OutputChunk) -> None:
            now = time.perf_counter()
            if chunk.token_ids:
                record.events.append((now, len(chunk.token_ids)))
                tokens.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                record.end = now
                record.finish_reason = chunk.finish_reason
                record.error = chunk.error
                record.is_cut = any(text.startswith("max_tokens:") for text in chunk.warnings)
                metrics = chunk.metrics
                if metrics is not None:
                    record.prompt_tokens = metrics.prompt_tokens
                    record.completion_tokens = metrics.completion_tokens
                    record.cycles = metrics.cycles
                    record.drafted = metrics.drafted_tokens
                    record.accepted = metrics.accepted_tokens
                    record.histogram = metrics.accepted_histogram
                done.set()

        record.start = time.perf_counter()
        try:
            request_id = self._llm.submit(prompt, params, on_chunk)
        except RequestError as error:
            record.end, record.error = time.perf_counter(), error.message
            return
        with self._lock:
            self._live.add(request_id)
        if stop.is_set():
            self._llm.cancel(request_id)
        while not done.wait(timeout=1.0):
            pass
        with self._lock:
            self._live.discard(request_id)
        record.digest = digest_of(tokens)

    def stop_all(self) -> None:
        """See :class:`Endpoint`."""
        with self._lock:
            live = list(self._live)
        for request_id in live:
            self._llm.cancel(request_id)


def per_request_params(params: SamplingParams, index: int) -> SamplingParams:
    """``params`` for the request at ``index``: a seed is offset, so that equal prompts do not get equal samples."""
    return params if params.seed is None else replace(params, seed=(params.seed + index) % 2**64)

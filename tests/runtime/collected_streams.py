"""Chunks of many requests, gathered on the engine's thread."""

from __future__ import annotations

import threading

from trtllm_dflash.runtime.outputs import OutputChunk, TokenLogprobs


class Streams:
    """Collects the chunks of many requests and knows when all have ended."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.last: dict[str, OutputChunk] = {}
        self._condition = threading.Condition()

    def add(self, chunk: OutputChunk) -> None:
        with self._condition:
            assert chunk.request_id not in self.last, "nothing follows the last chunk"
            self.text[chunk.request_id] = self.text.get(chunk.request_id, "") + chunk.text
            self.tokens[chunk.request_id] = self.tokens.get(chunk.request_id, ()) + chunk.token_ids
            self.logprobs[chunk.request_id] = self.logprobs.get(chunk.request_id, ()) + chunk.logprobs
            if chunk.finish_reason is not None:
                self.last[chunk.request_id] = chunk
            self._condition.notify_all()

    def wait_for_progress(self, timeout_s: float = 60.0) -> None:
        """Until one more chunk of any request has come."""
        with self._condition:
            self._condition.wait(timeout_s)

    def wait(self, count: int, timeout_s: float = 60.0) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.last) >= count, timeout_s)

"""The ``LLM`` facade."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Literal

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk, RequestOutput

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
SpeculationMode = Literal["auto", "on", "off"]


class LLM:
    """Generation on one engine directory. (skeleton: signatures are final, bodies come next)"""

    def __init__(
        self,
        engines: str | Path,
        *,
        speculation: SpeculationMode = "auto",
        device: str | None = None,
        block_size: int | None = None,
        kv_cache_tokens: int | None = None,
    ) -> None:
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[int, OutputChunk], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt (str = raw text, ids, or chat messages → chat template); blocks."""
        raise NotImplementedError

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[OutputChunk]:
        """Chunks of one request; leaving the iterator cancels it."""
        raise NotImplementedError

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_chunk: Callable[[OutputChunk], None],
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id at once. Raises ``RequestError`` for invalid input before queueing.
        ``on_chunk`` runs on the engine thread; it must be quick and not raise."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Ask for cancellation; the last chunk has finish_reason ``cancelled``. Unknown ids are ignored."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""A request as the host knows it: prompt, progress, text and counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.outputs import FinishReason, OutputChunk, RequestMetrics, TokenLogprobs
from trtllm_dflash.runtime.slots import SamplingMode
from trtllm_dflash.runtime.text import TextStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestSpec:
    """A validated request: token ids and everything derived from its parameters once.

    ``max_output_tokens`` is min(max_tokens, max_seq_len - prompt). ``seed`` is 64 bits.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: SamplingMode
    max_output_tokens: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seed: int


@dataclass
class Request:
    """Progress of one request.

    ``context_host`` is the slot's context length as far as results were read; ``in_flight`` counts the passes that were
    launched and not read, each of which emits at least one token unless the request has ended.
    """

    spec: RequestSpec
    text: TextStream
    on_chunk: Callable[[OutputChunk], None]
    block_size: int
    arrival: float = field(default_factory=time.perf_counter)
    slot: int | None = None
    pages: int = 0
    prefilled: int = 0
    context_host: int = 0
    in_flight: int = 0
    emitted: int = 0
    cancelled: bool = False
    finished: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None
    cycles: int = 0
    drafted: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * self.block_size

    @property
    def is_prefilled(self) -> bool:
        """Whether every prompt token's pass has been launched."""
        return self.prefilled == len(self.spec.prompt)

    @property
    def is_reproducible(self) -> bool:
        """Sampled with a seed of its own: what is drawn then must not depend on block sizes chosen by the clock."""
        return self.spec.mode.sampled and self.spec.params.seed is not None

    @property
    def may_emit(self) -> bool:
        """Whether the passes in flight may leave something to emit."""
        return self.remaining_host > self.in_flight

    @property
    def remaining_host(self) -> int:
        """Output tokens still allowed, as far as results were read."""
        return self.spec.max_output_tokens - self.emitted

    def deliver(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        stopped: bool,
        at_limit: bool,
        drafted: int | None,
    ) -> int:
        """Emit the tokens of one pass; returns how many belong to the output.

        Args:
            stopped: the last token is a stop id. at_limit: no more tokens are allowed.
            drafted: proposals of the cycle, or None for the prefill's first token.
        """
        delta = self.text.push(tokens, ended_by_stop_id=stopped)
        used = delta.tokens_used
        self.emitted += used
        self.context_host += used
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if drafted is not None:
            self.cycles += 1
            self.drafted += drafted
            self.histogram[max(used - 1, 0)] += 1
        reason: FinishReason | None = None
        if delta.stopped or stopped:
            reason = "stop"
        elif at_limit:
            reason = "length"
        text = delta.text if reason is None or delta.stopped else delta.text + self.text.finish()
        self._send(text, tuple(tokens[:used]), tuple(logprobs[:used]), reason, None)
        return used

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish without new tokens (cancelled or failed); text that was held back is still delivered."""
        self._send(self.text.finish(), (), (), reason, error)

    def metrics(self) -> RequestMetrics:
        """Counters up to now."""
        now = time.perf_counter()
        accepted = sum(kept * count for kept, count in enumerate(self.histogram))
        return RequestMetrics(
            prompt_tokens=len(self.spec.prompt),
            completion_tokens=self.emitted,
            cycles=self.cycles,
            drafted_tokens=self.drafted,
            accepted_tokens=accepted,
            accepted_histogram=tuple(self.histogram),
            acceptance_length=(accepted + self.cycles) / self.cycles if self.cycles else None,
            queue_s=(self.first_scheduled or now) - self.arrival,
            time_to_first_token_s=(self.first_token or now) - self.arrival,
            elapsed_s=now - self.arrival,
        )

    def _send(
        self,
        text: str,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
        error: str | None,
    ) -> None:
        self.finished = reason is not None
        if not (text or tokens or self.finished):
            return
        metrics = self.metrics() if self.finished else None
        try:
            self.on_chunk(OutputChunk(self.spec.request_id, text, tokens, logprobs, reason, error, metrics))
        except Exception:
            # The consumer's fault ends its own request, never the engine's thread.
            logger.exception("the consumer of request %s failed", self.spec.request_id)
            self.cancelled = True

"""A request as the host knows it: prompt, progress, text and counters."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.grammar import GrammarRun
from trtllm_dflash.runtime.outputs import ErrorKind, FinishReason, OutputChunk, RequestMetrics, TokenLogprobs
from trtllm_dflash.runtime.prefix_cache import CachedPage
from trtllm_dflash.runtime.request_limits import cut_warning
from trtllm_dflash.runtime.slots import SamplingMode
from trtllm_dflash.runtime.text import TextStream

logger = logging.getLogger(__name__)

PRIORITY_STEP_S = 10.0
"""A request of one priority more is served as if it had arrived this much earlier."""
_arrivals = itertools.count()


@dataclass(frozen=True)
class RequestSpec:
    """A validated request: token ids and everything derived from its parameters once.

    ``max_output_tokens`` is min(max_tokens, max_seq_len - prompt). ``seed`` is 64 bits. ``priority``: larger is sooner.
    ``deadline_s`` counts from the arrival. Prompts of different ``salt`` never share cached pages.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: SamplingMode
    max_output_tokens: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seed: int
    priority: int = 0
    deadline_s: float | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Submission:
    """What is handed to the engine of one request; ``grammar`` may still be compiling."""

    spec: RequestSpec
    on_chunk: Callable[[OutputChunk], None]
    grammar: GrammarRun | None = None


@dataclass(eq=False)
class Request:
    """Progress of one request.

    Attributes:
        slot: while it runs. pages: in order of positions. chain: those of them, the first ones, that are shared
        through the prefix cache. incarnation: how often it was admitted; results of a pass that was launched for an
        earlier one must be dropped.
        prefill_ids: what the prefill computes: the prompt, or after a preemption the prompt and all output but the
        last token, which is the anchor. prefilled: how many of their passes were launched.
        context_host: the slot's context length as far as results were read. in_flight: passes that were launched for
        this incarnation and not read, each of which emits at least one token unless the request has ended.
        output: tokens emitted. rank: place in the order of service, the smaller the sooner.
    """

    spec: RequestSpec
    text: TextStream
    on_chunk: Callable[[OutputChunk], None]
    block_size: int
    grammar: GrammarRun | None = None
    arrival: float = field(default_factory=time.perf_counter)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    chain: list[CachedPage] = field(default_factory=list)
    is_shared: bool = False
    incarnation: int = 0
    preemptions: int = 0
    prefilled: int = 0
    cached_tokens: int = 0
    context_host: int = 0
    in_flight: int = 0
    output: list[int] = field(default_factory=list)
    cancelled: bool = False
    is_expired: bool = False
    finish_reason: FinishReason | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    cycles: int = 0
    drafted: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * self.block_size
        self.prefill_ids = self.spec.prompt
        self.rank = (self.arrival - PRIORITY_STEP_S * self.spec.priority, next(_arrivals))
        self.deadline = None if self.spec.deadline_s is None else self.arrival + self.spec.deadline_s

    @property
    def emitted(self) -> int:
        """Output tokens so far."""
        return len(self.output)

    @property
    def finished(self) -> bool:
        """Whether the last chunk was sent."""
        return self.finish_reason is not None

    @property
    def extent(self) -> int:
        """Positions that it may come to hold."""
        return len(self.spec.prompt) + self.spec.max_output_tokens

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.spec.prompt, *self.output)

    @property
    def committed_host(self) -> int:
        """Leading positions of ``sequence`` that are known to be right in both caches.

        0 before the first token: only then is it certain that what the prompt left there are numbers. The last token
        is not computed yet.
        """
        if not self.output:
            return 0
        return len(self.spec.prompt) + self.emitted - 1 if self.is_prefilled else self.prefilled

    @property
    def is_prepared(self) -> bool:
        """Whether it may be admitted: a grammar must be compiled first."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, found outside a pass."""
        return None if self.grammar is None else self.grammar.failure

    @property
    def failure_kind(self) -> ErrorKind:
        """Whose failure that is."""
        return "engine" if self.grammar is None else self.grammar.failure_kind

    def go_back(self) -> None:
        """After a preemption: everything but the last token will be computed again."""
        self.prefilled = 0
        self.in_flight = 0
        self.prefill_ids = self.sequence[:-1] if self.output else self.spec.prompt

    @property
    def is_prefilled(self) -> bool:
        """Whether the pass of every token before the next cycle has been launched."""
        return self.prefilled == len(self.prefill_ids)

    @property
    def is_reproducible(self) -> bool:
        """Sampled with a seed of its own: what is drawn then must not depend on block sizes chosen by the clock."""
        return self.spec.mode.sampled and self.spec.params.seed is not None

    @property
    def may_emit(self) -> bool:
        """Whether a cycle may be launched: the passes in flight may leave something to emit, and a grammar's place is
        known only when they were read."""
        return self.remaining_host > self.in_flight and (self.grammar is None or self.in_flight == 0)

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
        if used < len(tokens):
            tokens, logprobs = tokens[:used], logprobs[:used]
        self.output.extend(tokens)
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
        error = None
        if self.grammar is not None and not self.grammar.advance(tokens):
            reason, error = "error", "structured_output: the grammar allows no token here that the other parameters do"
        text = delta.text if reason is None or delta.stopped else delta.text + self.text.finish()
        self._send(text, tuple(tokens), tuple(logprobs), reason, error, "request")
        return used

    def end(self, reason: FinishReason, error: str | None = None, kind: ErrorKind = "engine") -> None:
        """Finish without new tokens (cancelled or failed); text that was held back is still delivered."""
        self._send(self.text.finish(), (), (), reason, error, kind)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of a finished request: that it ended where its ``max_tokens`` had been cut."""
        wanted, room = self.spec.params.max_tokens, self.spec.max_output_tokens
        if self.finish_reason != "length" or wanted is None or wanted <= room:
            return ()
        return (cut_warning(len(self.spec.prompt), wanted, room),)

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
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )

    def _send(
        self,
        text: str,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
        error: str | None,
        kind: ErrorKind,
    ) -> None:
        self.finish_reason = reason
        if not (text or tokens or reason):
            return
        if reason is None:
            chunk = OutputChunk(self.spec.request_id, text, tokens, logprobs)
        else:
            chunk = OutputChunk(
                self.spec.request_id,
                text,
                tokens,
                logprobs,
                reason,
                error,
                self.metrics(),
                None if error is None else kind,
                self.warnings,
            )
        try:
            self.on_chunk(chunk)
        except Exception:
            # The consumer's fault ends its own request, never the engine's thread.
            logger.exception("the consumer of request %s failed", self.spec.request_id)
            self.cancelled = True


class JointMode:
    """What a cycle of several requests needs; remembered, since they are mostly those of the cycle before."""

    def __init__(self) -> None:
        self._ranks: list[tuple[float, int]] = []
        self._mode = SamplingMode()

    def of(self, requests: Sequence[Request]) -> SamplingMode:
        """The union of their modes."""
        ranks = [request.rank for request in requests]
        if ranks != self._ranks:
            self._mode = SamplingMode()
            for request in requests:
                self._mode |= request.spec.mode
            self._ranks = ranks
        return self._mode

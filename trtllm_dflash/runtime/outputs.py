"""What the runtime tells about a request, incrementally and at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorKind = Literal["engine", "deadline", "request"]
"""Whose an error is: the engine's, the deadline's, or the request's own."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of the target (before any sampling parameter) at one output position.

    ``top`` lists (token id, logprob) of the most probable tokens, descending.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestMetrics:
    """Facts of one finished request.

    Attributes:
        prompt_tokens, completion_tokens: counts; completion equals ``len(token_ids)``.
        cycles: draft-verify cycles (prefill excluded).
        drafted_tokens, accepted_tokens: drafts proposed / drafts kept that were emitted.
        accepted_histogram: entry j counts cycles that kept j drafts; sums to ``cycles``.
        acceptance_length: mean committed tokens per cycle, or None without a cycle. As in the reference
            (``dflash`` 0.1.0), the tokens of a cycle that is cut by a stop or limit count up to the cut.
        cached_tokens: prompt tokens that the prefix cache had when the request first ran.
        preemptions: times it gave its pages to others and went on later.
        queue_s, time_to_first_token_s, elapsed_s: seconds since arrival (queue: until first scheduled).
    """

    prompt_tokens: int
    completion_tokens: int
    cycles: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_histogram: tuple[int, ...]
    acceptance_length: float | None
    queue_s: float
    time_to_first_token_s: float
    elapsed_s: float
    cached_tokens: int = 0
    preemptions: int = 0


class OutputChunk(NamedTuple):
    """New output of one request. The last chunk has ``finish_reason`` and ``metrics`` set.

    A named tuple, which is made faster than a frozen dataclass: the engine makes one per request and cycle.

    Attributes:
        request_id: the request.
        text: new text; concatenated over chunks it is the whole text. Never splits a character.
        token_ids: new token ids. logprobs: one entry per new token id when asked for.
        finish_reason: set on the last chunk. error: message when the reason is ``error``, error_kind: whose it is.
        warnings: on the last chunk, what was done otherwise than asked: a ``max_tokens`` that did not fit.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    error_kind: ErrorKind | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; ``warnings`` are those of its last chunk."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the runtime.

    ``pages_total = pages_free + pages_used + pages_cached``: a cached page holds a prefix that nobody reads now, and is
    given away when pages are needed. ``counters`` are monotonic: requests_finished, requests_cancelled, requests_failed
    (requests_expired of them by their deadline), requests_refused (queue full), prompt_tokens, output_tokens, cycles,
    drafted_tokens, accepted_tokens, prefill_tokens (computed), prefix_lookup_tokens and prefix_hit_tokens (looked for /
    found in the prefix cache), preemptions, pages_evicted.
    """

    pages_total: int
    pages_free: int
    pages_used: int
    pages_cached: int
    running: int
    waiting: int
    counters: dict[str, int] = field(default_factory=dict)

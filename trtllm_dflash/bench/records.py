"""What one request looked like from its client's side."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["warm-up", "settling", "measured", "cool-down"]


@dataclass
class RequestRecord:
    """Times and counts of one request, filled in by the endpoint that runs it.

    Attributes:
        index: place in the list of prompts. phase: only ``measured`` requests are in latency and acceptance figures.
        start, end: seconds of ``time.perf_counter``: when it was sent, when its last event came or it was left.
        events: (seconds, tokens) of every event that brought tokens, in order.
        finish_reason: None when it was cut off. error: the failure's text, or None.
        is_cut: its max_tokens did not fit into the sequence, and it ended there.
        prompt_tokens, completion_tokens: counts, None when the endpoint does not say.
        cycles, drafted, accepted: of its speculative decoding, None when the endpoint does not say.
        histogram: entry j counts cycles that kept j drafts, or None.
        digest: SHA-256 of the output's token ids, or of its text where there are no ids.
    """

    index: int
    phase: Phase
    start: float = 0.0
    end: float = 0.0
    events: list[tuple[float, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    is_cut: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cycles: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    histogram: tuple[int, ...] | None = None
    digest: str | None = None

    @property
    def tokens(self) -> float:
        """Output tokens seen."""
        return sum(count for _, count in self.events)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first event with tokens."""
        return self.events[0][0] - self.start if self.events else None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first event to the last; None for fewer than two events."""
        return self.events[-1][0] - self.events[0][0] if len(self.events) > 1 else None

    @property
    def decoded_tokens(self) -> float:
        """Tokens after those of the first event."""
        return self.tokens - self.events[0][1] if self.events else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per cycle, the bonus counted."""
        if not self.cycles or self.accepted is None:
            return None
        return (self.accepted + self.cycles) / self.cycles

    def spread_evenly(self, tokens: int) -> None:
        """Give every event the same share of ``tokens``: for endpoints that say only the total."""
        if self.events:
            share = tokens / len(self.events)
            self.events = [(at, share) for at, _ in self.events]


def digest_of(output: object) -> str:
    """SHA-256 of an output (token ids or text), hexadecimal."""
    return hashlib.sha256(str(output).encode()).hexdigest()

"""A pass that was launched and whose result nobody has read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash.runtime.cycle_runner import PendingResult
from trtllm_dflash.runtime.request import Request


@dataclass(frozen=True)
class LaunchedPass:
    """Requests of a pass and its result on the way; ``block_size`` is None for a prefill's first tokens.

    ``incarnations`` are the requests' at the launch: who was preempted since gets nothing of the result.
    """

    requests: Sequence[Request]
    incarnations: Sequence[int]
    pending: PendingResult
    block_size: int | None

    @classmethod
    def of(cls, requests: Sequence[Request], pending: PendingResult, block_size: int | None) -> LaunchedPass:
        """A pass that was launched just now."""
        return cls(requests, [request.incarnation for request in requests], pending, block_size)

    def awaited(self) -> list[tuple[int, Request]]:
        """Rows whose request still waits for this very pass."""
        pairs = zip(self.requests, self.incarnations, strict=True)
        return [
            (row, request)
            for row, (request, incarnation) in enumerate(pairs)
            if request.slot is not None and request.incarnation == incarnation
        ]

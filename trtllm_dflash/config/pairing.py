"""What target and drafter must agree on, and the limits an engine is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuildLimits:
    """Limits of an engine; the one place where they live is the engine directory's config.json.

    Attributes:
        max_batch_size: running requests at a time (slots).
        max_seq_len: prompt plus output tokens of one request.
        max_num_tokens: prompt tokens of one step of the engine, over all requests.
        block_size: S used at run time; 1 when there is no drafter.
        page_tokens: tokens of one KV cache page.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    block_size: int
    page_tokens: int

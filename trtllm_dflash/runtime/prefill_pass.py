"""One prefill pass on tensors: which tokens of whom, where they go, and the padding that lets passes be recorded.

On the plugin kernels a pass is padded to one of a few sizes, each a CUDA graph: launched one by one, the few hundred
kernels of a short prompt take the host longer than the GPU. Padded tokens belong to nobody: they are not written, not
attended to, and their rows are not read. Padded requests have no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.session import EngineSession, TargetInputs
from trtllm_dflash.runtime.slots import SlotState

# From 512 tokens on a pass costs time in proportion, so steps are small there; below, the weights' bytes cost most.
_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_REQUESTS = (1, 8, 64)


@dataclass(frozen=True)
class PassSize:
    """Tokens and requests of a pass, padding included."""

    tokens: int
    requests: int


class PassSizes:
    """The sizes that passes of an engine are padded to.

    Args:
        limits: the engine's; its ``max_num_tokens`` and ``max_batch_size`` bound a pass.
    """

    def __init__(self, limits: BuildLimits) -> None:
        self._tokens = _up_to(_TOKENS, limits.max_num_tokens)
        self._requests = [r for r in _up_to(_REQUESTS, limits.max_batch_size) if r <= self._tokens[-1]]

    @property
    def largest(self) -> PassSize:
        """More than this many tokens or requests need several passes."""
        return PassSize(self._tokens[-1], self._requests[-1])

    def all(self) -> list[PassSize]:
        """Every size, the largest first."""
        return [PassSize(t, r) for t in reversed(self._tokens) for r in reversed(self._requests) if r <= t]

    def holding(self, tokens: int, requests: int) -> PassSize:
        """The smallest size for ``tokens`` of ``requests``, which are within :attr:`largest`."""
        held = next(r for r in self._requests if r >= requests)
        return PassSize(next(t for t in self._tokens if t >= max(tokens, held)), held)


def _up_to(choices: Sequence[int], limit: int) -> list[int]:
    """``choices`` below ``limit`` and the first that reaches it; the last one when none does."""
    reaching = [choice for choice in choices if choice >= limit]
    return [choice for choice in choices if choice < limit] + reaching[:1]


def pack(ids: Sequence[int], facts: Sequence[tuple[int, int, int]], size: PassSize, idle_slot: int) -> list[int]:
    """Token ids and, per request, slot, first position and number of tokens as :func:`target_inputs` takes them."""
    spare = size.requests - len(facts)
    slots, starts, counts = zip(*facts, strict=True)
    columns = ([*slots, *[idle_slot] * spare], [*starts, *[0] * spare], [*counts, *[0] * spare])
    return [*ids, *[0] * (size.tokens - len(ids)), *columns[0], *columns[1], *columns[2]]


def target_inputs(
    session: EngineSession, state: SlotState, packed: Tensor, size: PassSize, *, page_columns: int, max_query: int
) -> TargetInputs:
    """Inputs of the target for a pass that :func:`pack` describes; nothing is read on the host.

    Args:
        packed: ``[tokens + 3 * requests]`` int64. page_columns: pages that any request of the pass touches.
        max_query: host-known bound of one request's tokens.

    Returns:
        the logits asked for are those of each request's last token, ``[requests, V]``.
    """
    ids, facts = packed[: size.tokens], packed[size.tokens :].view(3, size.requests)
    slots, starts, counts = facts
    ends = counts.cumsum(0)
    index = torch.arange(size.tokens, device=packed.device)
    owner = torch.searchsorted(ends, index, right=True).clamp_max(size.requests - 1)
    exists = index < ends[-1]
    positions = torch.where(exists, index - (ends - counts - starts)[owner], 0)
    page_table = state.page_table[:, :page_columns].index_select(0, slots)
    page_tokens = session.limits.page_tokens
    cache_rows = page_table[owner, positions // page_tokens] * page_tokens + positions % page_tokens
    return TargetInputs(
        input_ids=ids,
        positions=positions,
        slots=torch.where(exists, cache_rows, -1),
        page_table=page_table,
        context_lengths=starts,
        query_starts=torch.nn.functional.pad(ends, (1, 0)),
        logit_rows=(ends - 1).clamp_min(0),
        max_query=max_query,
    )

"""The same passes on two sessions, page tables aside: prefill, draft, verify and injection of two requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, EngineSession, TargetInputs
from trtllm_dflash.runtime.cycle import flat_slots


@dataclass
class Observed:
    """Everything a driven session gave: per pass, and the visible part of both caches at the end."""

    prefill_logits: Tensor
    prefill_features: Tensor
    draft: DraftOutputs | None
    verify_logits: Tensor
    verify_features: Tensor
    visible: list[Tensor]


def drive(
    session: EngineSession, prompts: list[Tensor], *, seed: int, temperatures: Tensor, block_size: int
) -> Observed:
    """Prefill ``prompts`` in one pass, draft and verify one block of each, keep 1, 2, … rows, draft nothing more."""
    generator = torch.Generator().manual_seed(seed)
    batch, page_tokens = len(prompts), session.limits.page_tokens
    columns = -(-session.limits.max_seq_len // page_tokens)
    session.allocate_caches(batch * columns + 1)
    # Rows and pages in an order of their own, so that nothing works by accident.
    table = torch.arange(batch * columns).flip(0).view(batch, columns)
    lengths = torch.tensor([len(p) for p in prompts])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(torch.arange(batch), lengths)
    positions = torch.arange(int(starts[-1])) - starts[owner]
    slots = flat_slots(session, table[owner], positions[:, None], torch.ones(len(owner), 1, dtype=torch.bool)).view(-1)
    zeros = torch.zeros(batch, dtype=torch.int64)
    first = session.target(
        TargetInputs(torch.cat(prompts), positions, slots, table, zeros, starts, starts[1:] - 1, int(lengths.max()))
    )
    if session.drafter_config is not None:
        session.inject(first.features, positions, slots)
    vocab = session.target_config.vocab_size
    anchors = torch.randint(vocab, (batch,), generator=generator)
    block_lengths = torch.full((batch,), block_size)
    block_lengths[-1] = max(1, block_size - 1)
    draft = None
    tokens = torch.randint(vocab, (batch, block_size - 1), generator=generator)
    if session.drafter_config is not None:
        uniforms = torch.rand(batch, block_size - 1, generator=generator)
        draft = session.draft(DraftInputs(anchors, lengths, block_lengths, table, temperatures, uniforms), block_size)
        tokens = draft.draft_tokens
    offsets = torch.arange(block_size)
    block_positions = lengths[:, None] + offsets
    # What rows beyond a request's block compute is not defined.
    exists = offsets < block_lengths[:, None]
    second = session.target(
        TargetInputs(
            torch.cat((anchors[:, None], tokens), 1).reshape(-1),
            block_positions.reshape(-1),
            flat_slots(session, table, block_positions, exists).reshape(-1),
            table,
            lengths,
            torch.arange(batch + 1) * block_size,
            None,
            block_size,
            block_size,
        )
    )
    kept = torch.minimum(torch.arange(1, batch + 1), block_lengths)
    if session.drafter_config is not None:
        kept_slots = flat_slots(session, table, block_positions, offsets < kept[:, None])
        session.inject(
            second.features, block_positions.reshape(-1), kept_slots.reshape(-1), queries_per_request=block_size
        )
    return Observed(
        first.logits,
        first.features,
        draft,
        second.logits[exists.reshape(-1)],
        second.features[exists.reshape(-1)],
        visible_cache(session, table, lengths + kept),
    )


def visible_cache(session: EngineSession, table: Tensor, lengths: Tensor) -> list[Tensor]:
    """K and V of every layer, ``[tokens, kv_heads, head_dim]``: the rows of every request one after the other.

    One tensor for each cache output of the networks. A request alone may be all small values: V of a first token that
    attention uses as a sink is what is left of large numbers that cancel, and its error is theirs.
    """
    out = []
    for cache in (*session.target_caches, *session.drafter_caches):  # type: ignore[attr-defined]
        for pool in (cache.k, cache.v):
            parts = []
            for pages, length in zip(table, lengths.tolist(), strict=True):
                is_linear = len(pages) == 1 and pool.shape[2] > session.limits.page_tokens
                rows = pool[pages[0]].transpose(0, 1) if is_linear else pool[pages].flatten(0, 1)
                parts.append(rows[:length])
            out.append(torch.cat(parts))
    return out


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    scale = expected.abs().max().clamp_min(1e-30)
    return float((found.double() - expected.double()).abs().max() / scale)

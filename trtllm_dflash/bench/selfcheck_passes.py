"""The same passes on two sessions: prefill, inject, draft, verify, inject; and how far apart their results are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trtllm_dflash.engine.session import DraftInputs, EngineSession, TargetInputs
from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.runtime.cycle import flat_slots


@runtime_checkable
class ShowsCaches(Protocol):
    """A session that lets its caches be read."""

    @property
    def target_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The target's layers."""

    @property
    def drafter_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The drafter's layers."""


@dataclass(frozen=True)
class Passes:
    """What a session computed, on the CPU in float32.

    Attributes:
        prefill_logits ``[B, V]``, prefill_features ``[T, F*H]``, verify_logits ``[B*S, V]``, verify_features.
        draft_tokens: ``[B, S-1]``, greedy. anchors: ``[B]`` that the block began with.
        verified: ``[B, S-1]`` drafts that were verified (the reference's).
        target_cache, drafter_cache: K and V of every visible position, or None where the session does not show them.
    """

    prefill_logits: Tensor
    prefill_features: Tensor
    draft_tokens: Tensor
    verify_logits: Tensor
    verify_features: Tensor
    anchors: Tensor
    verified: Tensor
    target_cache: Tensor | None
    drafter_cache: Tensor | None


COMPARED = (
    "prefill_logits",
    "prefill_features",
    "verify_logits",
    "verify_features",
    "target_cache",
    "drafter_cache",
)


@torch.inference_mode()
def run_passes(session: EngineSession, prompts: Sequence[Sequence[int]], given: Passes | None = None) -> Passes:
    """Prefill ``prompts`` together, inject, draft a block each, verify it, and inject 1, 2, … rows of it.

    Args:
        session: with a drafter, fresh; its caches are allocated here.
        prompts: token ids. given: passes whose anchors and drafts are taken, so that both sessions verify the same.
    """
    device, batch = session.device, len(prompts)
    page_tokens, block = session.limits.page_tokens, session.limits.block_size
    columns = -(-session.limits.max_seq_len // page_tokens)
    session.allocate_caches(batch * columns)
    # Pages from the last to the first: nothing shall be right only because a request's pages lie in order.
    table = torch.arange(batch * columns, device=device).flip(0).view(batch, columns)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(torch.arange(batch, device=device), lengths)
    positions = torch.arange(int(starts[-1]), device=device) - starts[owner]
    everyone = torch.ones(len(owner), 1, dtype=torch.bool, device=device)
    slots = flat_slots(session, table[owner], positions[:, None], everyone).view(-1)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    none_cached = torch.zeros(batch, dtype=torch.int64, device=device)
    prefill = session.target(
        TargetInputs(ids, positions, slots, table, none_cached, starts, starts[1:] - 1, int(lengths.max()))
    )
    session.inject(prefill.features, positions, slots)
    anchors = prefill.logits.argmax(-1) if given is None else given.anchors.to(device)
    full = torch.full((batch,), block, dtype=torch.int64, device=device)
    greedy = torch.zeros(batch, device=device)
    uniforms = torch.zeros(batch, block - 1, device=device)
    drafted = session.draft(DraftInputs(anchors, lengths, full, table, greedy, uniforms), block).draft_tokens
    verified = drafted if given is None else given.verified.to(device)
    offsets = torch.arange(block, device=device)
    block_positions = lengths[:, None] + offsets
    exists = torch.ones(batch, block, dtype=torch.bool, device=device)
    verify = session.target(
        TargetInputs(
            torch.cat((anchors[:, None], verified), 1).reshape(-1),
            block_positions.reshape(-1),
            flat_slots(session, table, block_positions, exists).reshape(-1),
            table,
            lengths,
            torch.arange(batch + 1, device=device) * block,
            None,
            block,
            block,
        )
    )
    kept = torch.arange(batch, device=device) % block + 1
    kept_slots = flat_slots(session, table, block_positions, offsets < kept[:, None])
    session.inject(verify.features, block_positions.reshape(-1), kept_slots.reshape(-1), queries_per_request=block)
    visible = (lengths + kept).tolist()
    caches = (session.target_caches, session.drafter_caches) if isinstance(session, ShowsCaches) else None
    return Passes(
        prefill_logits=_host(prefill.logits),
        prefill_features=_host(prefill.features),
        draft_tokens=drafted.cpu(),
        verify_logits=_host(verify.logits),
        verify_features=_host(verify.features),
        anchors=anchors.cpu(),
        verified=verified.cpu(),
        target_cache=None if caches is None else _visible(caches[0], table, visible),
        drafter_cache=None if caches is None else _visible(caches[1], table, visible),
    )


def relative_errors(found: Passes, expected: Passes) -> dict[str, float]:
    """For each of ``COMPARED`` that both have: root mean square of the difference, over that of the expected values.

    The largest difference alone would judge a tensor by its one worst outlier, of which bf16 has some.
    """
    errors = {}
    for field in fields(Passes):
        if field.name not in COMPARED:
            continue
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if a is not None and b is not None:
            errors[field.name] = float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30))
    return errors


def equal_drafts(found: Passes, expected: Passes) -> float:
    """Share of greedy drafts that are the same token."""
    return float((found.draft_tokens == expected.draft_tokens).double().mean())


def _visible(caches: Sequence[CacheLayer[Tensor]], table: Tensor, lengths: Sequence[int]) -> Tensor:
    """K and V of every layer at the visible positions, flat: the same order for paged and linear caches."""
    parts = []
    for cache in caches:
        for pool in (cache.k, cache.v):
            for pages, length in zip(table, lengths, strict=True):
                # Linear: [rows, heads, tokens, dim] with one row a request; paged: [pages, tokens, heads, dim].
                linear = len(pages) == 1 and pool.shape[2] > pool.shape[1]
                rows = pool[pages[0]].transpose(0, 1) if linear else pool[pages].flatten(0, 1)
                parts.append(_host(rows[:length]).flatten())
    return torch.cat(parts)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)

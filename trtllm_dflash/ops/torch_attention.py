"""Paged attention of the torch dialect: gather the visible pages, then one masked product per layer.

This is the definition of right for the CUDA kernels and the TensorRT lowerings; it also is what the CPU runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_dflash.ops.interface import CacheLayer

# Above this many query rows the mask is not repeated for each query head of a group.
_GROUPED_ROWS_LIMIT = 64


def write_kv(cache: CacheLayer[Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write ``k, v [N, kv_heads, head_dim]`` at flat ``slots [N]``; -1 puts zeros into the scratch page (the last)."""
    kv_shape = cache.k.shape[-2:]
    flat_k = cache.k.view(-1, *kv_shape)
    flat_v = cache.v.view(-1, *kv_shape)
    dropped = slots < 0
    rows = torch.where(dropped, flat_k.shape[0] - 1, slots)
    # Zeros: every request whose page table is padded gathers the scratch page, and a mask does not hide a NaN.
    empty = dropped.view(-1, 1, 1)
    flat_k.index_copy_(0, rows, k.to(flat_k.dtype).masked_fill(empty, 0))
    flat_v.index_copy_(0, rows, v.to(flat_v.dtype).masked_fill(empty, 0))


@dataclass
class AttentionPlan:
    """One pass over packed queries: positions, page gather and (un)padding, masks made once per window."""

    pages: Tensor
    batch: int
    queries: int
    query_positions: Tensor
    pad_rows: Tensor | None
    unpad_rows: Tensor | None
    masks: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, key_count: int, repeats: int) -> Tensor:
        """Additive mask ``[B, 1, repeats * queries, keys]``: 0 where visible, -inf elsewhere."""
        key = (window, key_count, repeats)
        if key not in self.masks:
            keys = torch.arange(key_count, device=self.query_positions.device)
            distance = self.query_positions[:, :, None] - keys
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            self.masks[key] = _additive(visible, repeats)
        return self.masks[key]


@dataclass
class BlockAttentionPlan:
    """One non-causal or causal block per request over cached context and the block itself."""

    pages: Tensor
    batch: int
    block_size: int
    context_lengths: Tensor
    block_lengths: Tensor
    masks: dict[tuple[int | None, bool, int, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, causal: bool, cached_keys: int, repeats: int) -> Tensor:
        """Additive mask ``[B, 1, repeats * S, cached_keys + S]``."""
        key = (window, causal, cached_keys, repeats)
        if key not in self.masks:
            device = self.context_lengths.device
            rows = torch.arange(self.block_size, device=device)
            keys = torch.arange(cached_keys, device=device)
            cached = (keys < self.context_lengths[:, None])[:, None, :]
            cached = cached.expand(-1, self.block_size, -1)
            if window is not None:
                cached = cached & (self.context_lengths[:, None, None] + rows[:, None] - keys < window)
            offset = rows[:, None] - rows
            inside = torch.ones_like(offset, dtype=torch.bool)
            if causal:
                inside = inside & (offset >= 0)
            if window is not None:
                inside = inside & (offset.abs() < window)
            inside = inside & (rows < self.block_lengths[:, None])[:, None, :]
            self.masks[key] = _additive(torch.cat((cached, inside), dim=-1), repeats)
        return self.masks[key]


def plan_attention(
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    max_query: int,
    queries_per_request: int | None,
    total_queries: int,
) -> AttentionPlan:
    """See ``Ops.plan_attention``. Ragged queries are padded to ``max_query`` rows per request."""
    batch = page_table.shape[0]
    device = page_table.device
    offsets = torch.arange(max_query, device=device)
    pad_rows = unpad_rows = None
    if queries_per_request is None:
        starts = query_starts[:-1, None]
        pad_rows = torch.minimum(starts + offsets, query_starts[1:, None] - 1).clamp_min(0).reshape(-1)
        rows = torch.arange(total_queries, device=device)
        request = torch.searchsorted(query_starts[1:], rows, right=True)
        unpad_rows = request * max_query + rows - query_starts[request]
    return AttentionPlan(
        pages=page_table.reshape(-1),
        batch=batch,
        queries=max_query,
        query_positions=context_lengths[:, None] + offsets,
        pad_rows=pad_rows,
        unpad_rows=unpad_rows,
    )


def plan_block_attention(
    page_table: Tensor, context_lengths: Tensor, block_lengths: Tensor, block_size: int
) -> BlockAttentionPlan:
    """See ``Ops.plan_block_attention``."""
    return BlockAttentionPlan(page_table.reshape(-1), page_table.shape[0], block_size, context_lengths, block_lengths)


def paged_attention(
    plan: AttentionPlan, q: Tensor, cache: CacheLayer[Tensor], *, scale: float, window: int | None
) -> Tensor:
    """See ``Ops.paged_attention``."""
    if plan.pad_rows is not None:
        q = q.index_select(0, plan.pad_rows)
    keys, values = _gather(cache.k, plan.pages, plan.batch), _gather(cache.v, plan.pages, plan.batch)
    q = q.view(plan.batch, plan.queries, *q.shape[-2:])
    repeats = _mask_repeats(q, keys)
    out = _attend(q, keys, values, plan.mask(window, keys.shape[1], repeats), scale)
    return out if plan.unpad_rows is None else out.index_select(0, plan.unpad_rows)


def block_attention(
    plan: BlockAttentionPlan,
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    cache: CacheLayer[Tensor],
    *,
    scale: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    """See ``Ops.block_attention``."""
    q = q.view(plan.batch, plan.block_size, *q.shape[-2:])
    block_shape = (plan.batch, plan.block_size, *k_block.shape[-2:])
    cached = _gather(cache.k, plan.pages, plan.batch)
    keys = torch.cat((cached, k_block.to(cached.dtype).view(block_shape)), dim=1)
    values = torch.cat((_gather(cache.v, plan.pages, plan.batch), v_block.to(cached.dtype).view(block_shape)), dim=1)
    repeats = _mask_repeats(q, keys)
    return _attend(q, keys, values, plan.mask(window, causal, cached.shape[1], repeats), scale)


def _gather(pool: Tensor, pages: Tensor, batch: int) -> Tensor:
    """Pages of every request as ``[B, P * page_tokens, kv_heads, head_dim]``."""
    return pool.index_select(0, pages).view(batch, -1, *pool.shape[-2:])


def _mask_repeats(q: Tensor, keys: Tensor) -> int:
    group = q.shape[2] // keys.shape[2]
    return group if q.shape[1] <= _GROUPED_ROWS_LIMIT else 1


def _additive(visible: Tensor, repeats: int) -> Tensor:
    """``[B, queries, keys]`` bool → additive float32 ``[B, 1, repeats * queries, keys]``."""
    mask = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    mask.masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, repeats, 1).unsqueeze(1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``q [B, queries, heads, D]`` over ``keys, values [B, L, kv_heads, D]`` → ``[B * queries, heads, D]``."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    mask = mask.to(q.dtype)
    if mask.shape[2] == group * queries:
        # Rows of one group share a K/V head, so they become one taller query and K/V are not repeated.
        grouped = q.view(batch, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(batch, kv_heads, group * queries, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        out = out.view(batch, kv_heads, group, queries, head_dim).permute(0, 3, 1, 2, 4)
    else:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, mask, scale=scale, enable_gqa=group > 1
        ).transpose(1, 2)
    return out.reshape(batch * queries, heads, head_dim)

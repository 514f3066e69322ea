"""The native lowering: TensorRT's own attention and cache layers over linear caches, no plugins.

A linear cache has one row per slot, ``[rows, kv_heads, row_tokens, head_dim]``, and the batch of a network is the rows
of its caches. Packed tokens ``N`` of the operation set are ``[B, S]`` here, heads are ``[B, heads, S, head_dim]``.
What a page table is to a paged cache, :class:`LinearPass` is to this one.

The draft network writes its block's K/V behind the visible context instead of copying the cache to append it: such
rows lie at and beyond ``context_lengths``, so nobody sees them, and injection overwrites them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dflash.ops import tensorrt_select as select
from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.ops.tensorrt_dense import RotaryAt, TensorRTDense, Vector
from trtllm_dflash.ops.tensorrt_network import Columns, NetworkTensor

_BEYOND_ANY_POSITION = 1 << 30


@dataclass(frozen=True)
class LinearPass:
    """Where the rows of one pass lie.

    Attributes:
        positions: ``[B, S]`` int32. write_starts: ``[B]`` int32, first cache position that is written.
        key_lengths: ``[B]`` int32, cache positions that any query of the row may see.
    """

    positions: NetworkTensor
    write_starts: NetworkTensor
    key_lengths: NetworkTensor


@dataclass
class LinearAttentionPlan:
    """One pass's placement and what its masks are made of.

    ``is_block``: keys are bounded by the row's length, not by the query. ``keys [1, 1, 1, row_tokens]`` counts cache
    positions, ``query [B, 1, S, 1]`` are the queries' positions; made at first use.
    """

    where: LinearPass
    is_block: bool
    keys: NetworkTensor = None
    query: NetworkTensor = None


class NativeOps(TensorRTDense):
    """``Ops[Columns]`` on linear caches; documented in :class:`trtllm_dflash.ops.interface.Ops`."""

    # Heads
    def heads(self, x: Columns, first: int, count: int, head_dim: int) -> Columns:
        taken = self.take_columns(x, first * head_dim, count * head_dim)
        return self.one(self.w.reshape(taken, (0, 0, count, head_dim), after=(0, 2, 1, 3)))

    def merge_heads(self, x: Columns) -> Columns:
        whole = self.whole(x)
        width = whole.shape[1] * whole.shape[3]
        return self.one(self.w.reshape(whole, (0, 0, width), before=(0, 2, 1, 3)))

    def rotary(self, x: Columns, rows: RotaryAt) -> Columns:
        return self.one(self.rotate(self.whole(x), rows))

    # Caches
    def write_kv(self, cache: CacheLayer[Columns], k: Columns, v: Columns, slots: LinearPass) -> None:
        for place, rows in ((cache.k, k), (cache.v, v)):
            self._update(place, rows, slots)

    def _update(self, cache: Columns, rows: Columns, where: LinearPass) -> None:
        w, tensor = self.w, self.whole(cache)
        update = w.cast(self.whole(rows), tensor.dtype)
        layer = w.network.add_kv_cache_update(tensor, update, where.write_starts, w.trt.KVCacheMode.LINEAR)
        self.updated[tensor.name] = w.add("cache_update", layer)

    # Attention
    def plan_attention(
        self,
        page_table: LinearPass,
        context_lengths: Any,
        query_starts: Any,
        max_query: int,
        *,
        queries_per_request: int | None,
        total_queries: int,
    ) -> LinearAttentionPlan:
        return LinearAttentionPlan(page_table, is_block=False)

    def paged_attention(
        self, plan: LinearAttentionPlan, q: Columns, cache: CacheLayer[Columns], *, scale: float, window: int | None
    ) -> Columns:
        return self._attend(plan, q, cache, scale, window, causal=True)

    def plan_block_attention(
        self, page_table: LinearPass, context_lengths: Columns, block_lengths: Columns, block_size: int
    ) -> LinearAttentionPlan:
        return LinearAttentionPlan(page_table, is_block=True)

    def block_attention(
        self,
        plan: LinearAttentionPlan,
        q: Columns,
        k_block: Columns,
        v_block: Columns,
        cache: CacheLayer[Columns],
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Columns:
        self.write_kv(cache, k_block, v_block, plan.where)
        return self._attend(plan, q, cache, scale, window, causal=causal)

    def _attend(
        self,
        plan: LinearAttentionPlan,
        q: Columns,
        cache: CacheLayer[Columns],
        scale: float,
        window: int | None,
        *,
        causal: bool,
    ) -> Columns:
        w, trt = self.w, self.w.trt
        keys, values = (self.updated[self.whole(place).name] for place in (cache.k, cache.v))
        query = self.whole(q)
        query = w.cast(w.elementwise("PROD", query, w.scalar(scale, query)), keys.dtype)
        mask = self._mask(plan, window, causal, keys.shape[2])
        attention = w.network.add_attention_v2(
            query, keys, values, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
        )
        if attention is not None:
            attention.mask = mask
            # The mask alone decides; the lengths only let a kernel skip what it hides anyway.
            attention.key_value_lengths = plan.where.key_lengths
            attention.decomposable = True
        return self.one(w.add("attention", attention))

    def _mask(self, plan: LinearAttentionPlan, window: int | None, causal: bool, row_tokens: int) -> NetworkTensor:
        """Bool ``[B, 1, S, row_tokens]``, true where the query sees the key.

        Keys of a target pass reach up to each query; those of a block up to the row's visible length. Every layer
        compares anew: TensorRT takes the comparison into its attention kernel, and a comparison that several layers
        share it takes several times under one name, which it then refuses ("more than one op named …_iota").
        """
        w = self.w
        if plan.keys is None:
            plan.keys = w.constant(torch.arange(row_tokens, dtype=torch.int32).view(1, 1, 1, -1))
            plan.query = w.reshape(plan.where.positions, (0, 1, -1, 1))
        keys, query = plan.keys, plan.query
        distance = w.elementwise("SUB", query, keys)
        terms = []
        if causal:
            terms.append(w.elementwise("GREATER", distance, w.scalar(-1, distance)))
        if plan.is_block:
            terms.append(w.elementwise("LESS", keys, w.reshape(plan.where.key_lengths, (0, 1, 1, 1))))
        if window is not None:
            reach = distance if causal else w.unary("ABS", distance)
            terms.append(w.elementwise("LESS", reach, w.scalar(window, reach)))
        elif not causal:
            # True everywhere: it only gives the mask its query dimension.
            terms.append(w.elementwise("LESS", distance, w.scalar(_BEYOND_ANY_POSITION, distance)))
        mask = terms[0]
        for term in terms[1:]:
            mask = w.elementwise("AND", mask, term)
        return mask

    # DFlash 2
    def grouped_dynamic_conv(self, x: Columns, dynamic: Columns, base: Vector, block_size: int) -> Columns:
        return self.one(select.grouped_dynamic_conv(self.w, self.whole(x), self.whole(dynamic), base.weight))

    def selector_walk(
        self,
        unary: Columns,
        candidates: Columns,
        hidden: Columns,
        predecessor_codebook: Vector,
        successor_codebook: Vector,
        anchors: Columns,
        temperatures: Columns,
        uniforms: Columns,
    ) -> tuple[Columns, Columns]:
        codebooks = (predecessor_codebook.weight, successor_codebook.weight)
        drafted = (self.whole(x) for x in (unary, candidates, hidden))
        asked = (self.whole(x) for x in (anchors, temperatures, uniforms))
        tensors: list[NetworkTensor] = [*drafted, *codebooks, *asked]
        tokens, q_rows = select.selector_walk(self.w, *tensors)
        return self.one(tokens), self.one(q_rows)

    # Shape plumbing
    def proposal_rows(self, x: Columns, block_size: int) -> Columns:
        return self.one(self.w.slice(self.whole(x), 1, 1, block_size - 1))

    def per_request(self, x: Columns, rows: int) -> Columns:
        return x

    def take_rows(self, x: Columns, rows: Columns) -> Columns:
        return self.one(self.w.gather(self.whole(x), self.whole(rows), 1, per_request=True))

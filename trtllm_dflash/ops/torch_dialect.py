"""The torch dialect: every operation computed, on a CPU or a CUDA GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_dflash.ops import torch_attention as attention
from trtllm_dflash.ops import torch_dense as dense
from trtllm_dflash.ops import torch_select as select
from trtllm_dflash.ops.composed import ComposedOps
from trtllm_dflash.ops.interface import CacheLayer, Linear


class TorchOps(ComposedOps[Tensor]):
    """``Ops[Tensor]``; documented in :class:`trtllm_dflash.ops.interface.Ops`."""

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def linear(self, x: Tensor, projection: Linear[Tensor]) -> Tensor:
        return dense.linear(x, projection.weight, projection.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return dense.rms_norm(x, weight, eps)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return dense.swiglu(gate_up)

    def concat_columns(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=-1)

    def heads(self, x: Tensor, first: int, count: int, head_dim: int) -> Tensor:
        return x[:, first * head_dim : (first + count) * head_dim].unflatten(-1, (count, head_dim))

    def head_range(self, x: Tensor, first: int, count: int) -> Tensor:
        return x[:, first : first + count]

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.flatten(-2)

    def to_float32(self, x: Tensor) -> Tensor:
        return x.float()

    def rotary_rows(self, cos_sin: Tensor, positions: Tensor) -> dense.RotaryRows:
        return dense.rotary_rows(cos_sin, positions)

    def rotary(self, x: Tensor, rows: dense.RotaryRows) -> Tensor:
        return dense.rotary(x, rows)

    def write_kv(self, cache: CacheLayer[Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        attention.write_kv(cache, k, v, slots)

    def plan_attention(
        self,
        page_table: Tensor,
        context_lengths: Tensor,
        query_starts: Tensor,
        max_query: int,
        *,
        queries_per_request: int | None,
        total_queries: int,
    ) -> attention.AttentionPlan:
        return attention.plan_attention(
            page_table, context_lengths, query_starts, max_query, queries_per_request, total_queries
        )

    def paged_attention(
        self, plan: attention.AttentionPlan, q: Tensor, cache: CacheLayer[Tensor], *, scale: float, window: int | None
    ) -> Tensor:
        return attention.paged_attention(plan, q, cache, scale=scale, window=window)

    def plan_block_attention(
        self, page_table: Tensor, context_lengths: Tensor, block_lengths: Tensor, block_size: int
    ) -> attention.BlockAttentionPlan:
        return attention.plan_block_attention(page_table, context_lengths, block_lengths, block_size)

    def block_attention(
        self,
        plan: attention.BlockAttentionPlan,
        q: Tensor,
        k_block: Tensor,
        v_block: Tensor,
        cache: CacheLayer[Tensor],
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        return attention.block_attention(plan, q, k_block, v_block, cache, scale=scale, window=window, causal=causal)

    def grouped_dynamic_conv(self, x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
        return select.grouped_dynamic_conv(x, dynamic, base, block_size)

    def columns(self, x: Tensor, first: int, count: int) -> Tensor:
        return x[..., first : first + count]

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return select.top_k(x, k)

    def selector_walk(
        self,
        unary: Tensor,
        candidates: Tensor,
        hidden: Tensor,
        predecessor_codebook: Tensor,
        successor_codebook: Tensor,
        anchors: Tensor,
        temperatures: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return select.selector_walk(
            unary,
            candidates,
            hidden,
            predecessor_codebook,
            successor_codebook,
            anchors,
            temperatures,
            uniforms,
        )

    def independent_draw(
        self, unary: Tensor, temperatures: Tensor, uniforms: Tensor, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        return select.independent_draw(unary, temperatures, uniforms, candidates)

    def block_ids(self, anchors: Tensor, mask_token_id: int, block_size: int) -> Tensor:
        return F.pad(anchors.unsqueeze(1), (0, block_size - 1), value=mask_token_id).reshape(-1)

    def block_positions(self, context_lengths: Tensor, block_size: int) -> Tensor:
        return (context_lengths[:, None] + torch.arange(block_size, device=context_lengths.device)).reshape(-1)

    def proposal_rows(self, x: Tensor, block_size: int) -> Tensor:
        return x.view(-1, block_size, x.shape[-1])[:, 1:].reshape(-1, x.shape[-1])

    def per_request(self, x: Tensor, rows: int) -> Tensor:
        return x.view(-1, rows, x.shape[-1])

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def add_offsets(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return ids + offsets[ids]

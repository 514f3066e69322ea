"""The torch dialect with the kernels of ``plugins/``: what a CUDA GPU runs when the plugin library is there.

Dense products of more than a few rows stay with torch (cuBLASLt). Everything here may be captured in a CUDA graph:
nothing synchronises, and no launch depends on lengths that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_attention as attention
from trtllm_dflash.ops import cuda_dense as dense
from trtllm_dflash.ops import cuda_fused as fused
from trtllm_dflash.ops import cuda_select as select
from trtllm_dflash.ops.interface import CacheLayer, HeadLayout, Linear
from trtllm_dflash.ops.plugin_library import find_library, load_library
from trtllm_dflash.ops.torch_dense import Fp8Matrix
from trtllm_dflash.ops.torch_dialect import TorchOps

_HEAD_DIMS = (64, 80, 96, 128, 256)
_MAX_GROUP = 16
# What the walk and candidate kernels take.
_MAX_BLOCK = 33
_PAGE_MULTIPLE = 16


@dataclass(frozen=True)
class RotaryAt:
    """The table and the positions that rows of it are read at, inside the kernels."""

    cos_sin: Tensor
    positions: Tensor


@dataclass(frozen=True)
class PackedPlan:
    """Arguments of one pass over packed queries."""

    page_table: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    max_query: int


@dataclass(frozen=True)
class BlockPlan:
    """Arguments of one pass over blocks. ``rows [B * S]`` numbers the block's rows."""

    page_table: Tensor
    context_lengths: Tensor
    block_lengths: Tensor
    block_size: int


class KeptColumns:
    """``count`` equal tensors side by side, written one at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.tensor: Tensor | None = None

    def columns_like(self, x: Tensor, place: int) -> Tensor:
        """Columns for the tensor number ``place``, of x's shape and dtype."""
        rows, width = x.shape
        if self.tensor is None:
            self.tensor = x.new_empty(rows, self._count * width)
        return self.tensor[:, place * width : (place + 1) * width]


def why_not_kernels(
    target: TargetConfig, drafter: DrafterConfig | None, *, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why this pair cannot run on the plugin kernels here, or None when it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the compute dtype is {dtype}, the kernels take bfloat16 and float16"
    for name, config in (("target", target), ("drafter", drafter)):
        if config is None:
            continue
        if config.head_dim not in _HEAD_DIMS:
            return f"the {name}'s head_dim is {config.head_dim}, compiled are {', '.join(map(str, _HEAD_DIMS))}"
        if config.num_heads // config.num_kv_heads > _MAX_GROUP:
            return f"the {name} has {config.num_heads // config.num_kv_heads} heads per KV head, at most {_MAX_GROUP}"
        if config.hidden_size % 8:
            return f"the {name}'s hidden_size {config.hidden_size} is not a multiple of 8"
    if page_tokens % _PAGE_MULTIPLE:
        return f"page_tokens is {page_tokens}, expected a multiple of {_PAGE_MULTIPLE}"
    if target.vocab_size > select.MAX_VOCABULARY:
        return f"the vocabulary has {target.vocab_size} ids, at most {select.MAX_VOCABULARY}"
    path = find_library()
    if path is None:
        return "the plugin library was not found (trtllm-dflash plugins build makes it)"
    try:
        compiled = load_library(path).info.sm
    except EngineError as error:
        return str(error)
    major, minor = torch.cuda.get_device_capability(device)
    if not any(sm.rstrip("af") == f"{major}{minor}" for sm in compiled):
        return f"the plugin library was compiled for SM {', '.join(compiled)}, this GPU is SM {major}{minor}"
    return None


class CudaOps(TorchOps):
    """``Ops[Tensor]`` on CUDA tensors of bfloat16 or float16; see :func:`why_not_kernels`."""

    def __init__(self) -> None:
        self._stacked: dict[tuple[int, ...], Tensor] = {}
        self._in_order: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    # Dense
    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        # Indexing gathers whole rows in wide loads; F.embedding's kernel takes four times as long for a few rows.
        return table[ids]

    def linear(self, x: Tensor, projection: Linear[Tensor]) -> Tensor:
        weight = projection.weight
        if isinstance(weight, Tensor | Fp8Matrix) and dense.worthwhile(x, weight):
            return dense.skinny_linear(x, weight, projection.bias)
        if isinstance(weight, Fp8Matrix):
            return dense.fp8_linear(x, weight, projection.bias)
        return super().linear(x, projection)

    def gated(self, x: Tensor, projection: Linear[Tensor]) -> Tensor:
        weight = projection.weight
        if projection.bias is None and isinstance(weight, Tensor | Fp8Matrix) and dense.worthwhile(x, weight):
            return dense.skinny_gate_up(x, weight)
        return self.swiglu(self.linear(x, projection))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or not x.is_contiguous() or x.dtype not in (weight.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        return fused.add_rms_norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, fused.add_rms_norm(y, x, weight, eps)

    def side_by_side(self, count: int) -> KeptColumns:
        return KeptColumns(count)

    def add_rms_norm_kept(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float, kept: KeptColumns, place: int
    ) -> tuple[Tensor, Tensor]:
        # The kernel writes the sum a second time: a copy of its own would stand between the norm and the projection.
        return x, fused.add_rms_norm(y, x, weight, eps, kept=kept.columns_like(x, place))

    def joined(self, kept: KeptColumns) -> Tensor:
        if kept.tensor is None:
            raise EngineError("nothing was kept")
        return kept.tensor

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return fused.swiglu(gate_up)

    def head_logits(self, x: Tensor) -> Tensor:
        # Acceptance converts as it reads: a float32 copy of [B * S, V] would cost more than the head's output.
        return x

    # Rotary embedding and caches
    def rotary_rows(self, cos_sin: Tensor, positions: Tensor) -> RotaryAt:  # type: ignore[override]
        return RotaryAt(cos_sin, positions)

    def rotate_qkv(
        self, qkv: Tensor, layout: HeadLayout, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, rows: RotaryAt
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel writes K and V into a cache: here one page that holds exactly the block.
        count = qkv.shape[0]
        shape = (1, count, layout.kv_heads, layout.head_dim)
        block = CacheLayer(qkv.new_empty(shape), qkv.new_empty(shape))
        q = self.rotate_qkv_write(qkv, layout, q_norm, k_norm, eps, rows, block, self._count_to(count, rows.positions))
        return q, block.k[0], block.v[0]

    def _count_to(self, count: int, like: Tensor) -> Tensor:
        """0, 1, … below ``count``; made once, a launch in front of every layer's attention costs more than it looks."""
        key = (count, like.dtype, like.device)
        if key not in self._in_order:
            self._in_order[key] = torch.arange(count, dtype=like.dtype, device=like.device)
        return self._in_order[key]

    def rotate_qkv_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        rows: RotaryAt,
        cache: CacheLayer[Tensor],
        slots: Tensor,
    ) -> Tensor:
        return fused.qk_norm_rope_write(
            qkv,
            layout.heads,
            rows.positions,
            slots,
            rows.cos_sin,
            q_norm,
            k_norm,
            eps,
            cache.k,
            cache.v,
            # Made before the first layer; torch's launches since then do not overlap.
            settled=True,
        )

    def inject_kv(
        self,
        kv: Tensor,
        layout: HeadLayout,
        k_norms: Sequence[Tensor | None],
        eps: float,
        rows: RotaryAt,
        caches: Sequence[CacheLayer[Tensor]],
        slots: Tensor,
    ) -> None:
        fused.inject_kv(
            kv.view(kv.shape[0], len(caches), 2, layout.kv_heads, layout.head_dim),
            rows.positions,
            slots,
            rows.cos_sin,
            self._stack(k_norms),
            eps,
            [cache.k for cache in caches],
            [cache.v for cache in caches],
        )

    def _stack(self, norms: Sequence[Tensor | None]) -> Tensor | None:
        present = [norm for norm in norms if norm is not None]
        if len(present) < len(norms):
            return None
        key = tuple(norm.data_ptr() for norm in present)
        if key not in self._stacked:
            self._stacked[key] = torch.stack(present)
        return self._stacked[key]

    # Attention
    def plan_attention(  # type: ignore[override]
        self,
        page_table: Tensor,
        context_lengths: Tensor,
        query_starts: Tensor,
        max_query: int,
        *,
        queries_per_request: int | None,
        total_queries: int,
    ) -> PackedPlan:
        return PackedPlan(page_table, context_lengths, query_starts, max_query)

    def paged_attention(  # type: ignore[override]
        self, plan: PackedPlan, q: Tensor, cache: CacheLayer[Tensor], *, scale: float, window: int | None
    ) -> Tensor:
        return attention.paged_attention(
            q,
            cache.k,
            cache.v,
            plan.page_table,
            plan.context_lengths,
            plan.query_starts,
            plan.max_query,
            scale=scale,
            window=window,
            # Rows below the context were written by earlier passes, long before the launch in front.
            context_settled=True,
        )

    def plan_block_attention(  # type: ignore[override]
        self, page_table: Tensor, context_lengths: Tensor, block_lengths: Tensor, block_size: int
    ) -> BlockPlan:
        return BlockPlan(page_table, context_lengths, block_lengths, block_size)

    def block_attention(  # type: ignore[override]
        self,
        plan: BlockPlan,
        q: Tensor,
        k_block: Tensor,
        v_block: Tensor,
        cache: CacheLayer[Tensor],
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        return attention.block_attention(
            q,
            k_block,
            v_block,
            cache.k,
            cache.v,
            plan.page_table,
            plan.context_lengths,
            plan.block_lengths,
            plan.block_size,
            scale=scale,
            window=window,
            causal=causal,
            context_settled=True,
        )

    # DFlash 2
    def grouped_dynamic_conv(self, x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
        return select.grouped_conv(x, dynamic, base.contiguous(), block_size)

    def conv_add_rms_norm(
        self, x: Tensor, y: Tensor, dynamic: Tensor, base: Tensor, block_size: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed = select.grouped_conv_add_rms_norm(y, dynamic, base, block_size, x, weight, eps)
        if normed is None:
            raise EngineError("grouped_conv_add_rms_norm gave no norm although it was asked for one")
        return x, normed

    def candidates(self, logits: Tensor, k: int, multiplier: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        return select.candidates(logits, k, multiplier=multiplier, softcap=softcap)

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
        if candidates.shape[1] + 1 > _MAX_BLOCK or candidates.shape[2] > select.MAX_CANDIDATES or hidden.shape[-1] % 8:
            return super().selector_walk(
                unary, candidates, hidden, predecessor_codebook, successor_codebook, anchors, temperatures, uniforms
            )
        return select.selector_walk(
            unary, candidates, hidden, predecessor_codebook, successor_codebook, anchors, temperatures, uniforms
        )

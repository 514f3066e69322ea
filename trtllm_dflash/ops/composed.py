"""Fused operations of the networks, composed from the primitive ones.

These are the places where one kernel may do the work of several operations. A dialect that has such a kernel overrides
the method; every other dialect inherits its definition from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from trtllm_dflash.ops.interface import CacheLayer, HeadLayout, Linear, Ops

T = TypeVar("T")


class ComposedOps(Generic[T]):
    """The fused part of :class:`trtllm_dflash.ops.interface.Ops`; mixed into a dialect that has the primitive part."""

    def gated(self: Ops[T], x: T, projection: Linear[T]) -> T:
        return self.swiglu(self.linear(x, projection))

    def add_rms_norm(self: Ops[T], x: T, y: T, weight: T, eps: float) -> tuple[T, T]:
        total = self.add(x, y)
        return total, self.rms_norm(total, weight, eps)

    def conv_add_rms_norm(
        self: Ops[T], x: T, y: T, dynamic: T, base: T, block_size: int, weight: T, eps: float
    ) -> tuple[T, T]:
        total = self.add(x, self.grouped_dynamic_conv(y, dynamic, base, block_size))
        return total, self.rms_norm(total, weight, eps)

    def side_by_side(self, count: int) -> Any:
        return [None] * count

    def add_rms_norm_kept(self: Ops[T], x: T, y: T, weight: T, eps: float, kept: Any, place: int) -> tuple[T, T]:
        total, normed = self.add_rms_norm(x, y, weight, eps)
        kept[place] = total
        return total, normed

    def joined(self: Ops[T], kept: Any) -> T:
        return self.concat_columns(kept)

    def rotate_qkv(
        self: Ops[T], qkv: T, layout: HeadLayout, q_norm: T | None, k_norm: T | None, eps: float, rows: Any
    ) -> tuple[T, T, T]:
        heads, kv_heads, head_dim = layout.heads, layout.kv_heads, layout.head_dim
        v = self.heads(qkv, heads + kv_heads, kv_heads, head_dim)
        if q_norm is None or k_norm is None:
            # Without head norms q and k turn together: one rotation instead of two.
            qk = self.rotary(self.heads(qkv, 0, heads + kv_heads, head_dim), rows)
            return self.head_range(qk, 0, heads), self.head_range(qk, heads, kv_heads), v
        q = self.rotary(self.rms_norm(self.heads(qkv, 0, heads, head_dim), q_norm, eps), rows)
        k = self.rotary(self.rms_norm(self.heads(qkv, heads, kv_heads, head_dim), k_norm, eps), rows)
        return q, k, v

    def rotate_qkv_write(
        self: Ops[T],
        qkv: T,
        layout: HeadLayout,
        q_norm: T | None,
        k_norm: T | None,
        eps: float,
        rows: Any,
        cache: CacheLayer[T],
        slots: T,
    ) -> T:
        q, k, v = self.rotate_qkv(qkv, layout, q_norm, k_norm, eps, rows)
        self.write_kv(cache, k, v, slots)
        return q

    def inject_kv(
        self: Ops[T],
        kv: T,
        layout: HeadLayout,
        k_norms: Sequence[T | None],
        eps: float,
        rows: Any,
        caches: Sequence[CacheLayer[T]],
        slots: T,
    ) -> None:
        for index, (k_norm, cache) in enumerate(zip(k_norms, caches, strict=True)):
            first = 2 * index * layout.kv_heads
            k = self.heads(kv, first, layout.kv_heads, layout.head_dim)
            if k_norm is not None:
                k = self.rms_norm(k, k_norm, eps)
            v = self.heads(kv, first + layout.kv_heads, layout.kv_heads, layout.head_dim)
            self.write_kv(cache, self.rotary(k, rows), v, slots)

    def head_logits(self: Ops[T], x: T) -> T:
        return self.to_float32(x)

    def candidates(self: Ops[T], logits: T, k: int, multiplier: float, softcap: float | None) -> tuple[T, T]:
        logits = self.to_float32(logits)
        if multiplier != 1.0:
            logits = self.scale(logits, multiplier)
        if softcap is not None:
            logits = self.softcap(logits, softcap)
        return self.top_k(logits, k)

"""The target decoder with feature capture. One function serves every family whose facts fit ``TargetConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.model.weights import LayerWeights, TargetWeights
from trtllm_dflash.ops.interface import CacheLayer, Ops

T = TypeVar("T")


def target_network(
    ops: Ops[T],
    config: TargetConfig,
    weights: TargetWeights[T],
    caches: Sequence[CacheLayer[T]],
    *,
    cos_sin: T,
    input_ids: T,
    positions: T,
    slots: T,
    page_table: T,
    context_lengths: T,
    query_starts: T,
    logit_rows: T | None,
    max_query: int,
    queries_per_request: int | None,
    total_queries: int,
    capture_layers: Sequence[int],
) -> tuple[T, T | None]:
    """One causal pass over packed tokens; shapes as ``engine.session.TargetInputs``.

    Returns:
        logits ``[R, V]`` float32 and features ``[T, F * H]``: the outputs of decoder layers ``capture_layers`` in
        that order (the last layer's before the final norm), or None when nothing is captured.
    """
    plan = ops.plan_attention(
        page_table,
        context_lengths,
        query_starts,
        max_query,
        queries_per_request=queries_per_request,
        total_queries=total_queries,
    )
    rows = ops.rotary_rows(cos_sin, positions)
    hidden = ops.embedding(weights.embedding, input_ids)
    captured: dict[int, T] = {}
    for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        hidden = _decoder_layer(ops, config, layer, cache, hidden, plan, rows, slots, config.sliding_windows[index])
        if index in capture_layers:
            captured[index] = hidden
    wanted = hidden if logit_rows is None else ops.take_rows(hidden, logit_rows)
    logits = ops.linear(ops.rms_norm(wanted, weights.final_norm, config.rms_norm_eps), weights.head)
    features = ops.concat_columns([captured[index] for index in capture_layers]) if capture_layers else None
    return ops.to_float32(logits), features


def _decoder_layer(
    ops: Ops[T],
    config: TargetConfig,
    layer: LayerWeights[T],
    cache: CacheLayer[T],
    hidden: T,
    plan: object,
    rows: object,
    slots: T,
    window: int | None,
) -> T:
    qkv = ops.linear(ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps), layer.attention.qkv)
    q, k, v = split_qkv(
        ops, qkv, layer, rows, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )
    ops.write_kv(cache, k, v, slots)
    mixed = ops.paged_attention(plan, q, cache, scale=config.head_dim**-0.5, window=window)
    hidden = ops.add(hidden, ops.linear(ops.merge_heads(mixed), layer.attention.dense))
    gate_up = ops.linear(ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps), layer.mlp.gate_up)
    return ops.add(hidden, ops.linear(ops.swiglu(gate_up), layer.mlp.down))


def split_qkv(
    ops: Ops[T],
    qkv: T,
    layer: LayerWeights[T],
    rows: object,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[T, T, T]:
    """``qkv [N, (heads + 2 kv_heads) * head_dim]`` → normed and rotated q, k, and plain v, each ``[N, heads, D]``."""
    v = ops.heads(qkv, heads + kv_heads, kv_heads, head_dim)
    q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
    if q_norm is None or k_norm is None:
        # Without head norms q and k turn together: one rotation instead of two.
        qk = ops.rotary(ops.heads(qkv, 0, heads + kv_heads, head_dim), rows)
        return ops.head_range(qk, 0, heads), ops.head_range(qk, heads, kv_heads), v
    q = ops.rotary(ops.rms_norm(ops.heads(qkv, 0, heads, head_dim), q_norm, eps), rows)
    k = ops.rotary(ops.rms_norm(ops.heads(qkv, heads, kv_heads, head_dim), k_norm, eps), rows)
    return q, k, v

"""The target decoder with feature capture. One function serves every family whose facts fit ``TargetConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.model.weights import TargetWeights
from trtllm_dflash.ops.interface import CacheLayer, HeadLayout, Ops

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
        logits ``[R, V]`` (``Ops.head_logits``) and features ``[T, F * H]``: the outputs of decoder layers
        ``capture_layers`` in that order (the last layer's before the final norm), or None when nothing is captured.

    Raises:
        ValueError: a layer is captured twice.
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
    layout = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
    eps = config.rms_norm_eps
    hidden = ops.embedding(weights.embedding, input_ids)
    normed = ops.rms_norm(hidden, weights.layers[0].input_norm, eps)
    # The norm after a layer belongs to what follows it, and is one operation with the layer's last addition.
    following = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
    places = {layer: place for place, layer in enumerate(capture_layers)}
    if len(places) < len(capture_layers):
        raise ValueError(f"capture_layers are {list(capture_layers)}, expected each layer once")
    captured = ops.side_by_side(len(places))
    for index, (layer, cache, next_norm) in enumerate(zip(weights.layers, caches, following, strict=True)):
        attention = layer.attention
        qkv = ops.linear(normed, attention.qkv)
        q = ops.rotate_qkv_write(qkv, layout, attention.q_norm, attention.k_norm, eps, rows, cache, slots)
        mixed = ops.paged_attention(plan, q, cache, scale=config.head_dim**-0.5, window=config.sliding_windows[index])
        projected = ops.linear(ops.merge_heads(mixed), attention.dense)
        hidden, normed = ops.add_rms_norm(hidden, projected, layer.post_norm, eps)
        fed = ops.linear(ops.gated(normed, layer.mlp.gate_up), layer.mlp.down)
        if index in places:
            hidden, normed = ops.add_rms_norm_kept(hidden, fed, next_norm, eps, captured, places[index])
        else:
            hidden, normed = ops.add_rms_norm(hidden, fed, next_norm, eps)
    wanted = normed if logit_rows is None else ops.take_rows(normed, logit_rows)
    logits = ops.head_logits(ops.linear(wanted, weights.head))
    features = ops.joined(captured) if places else None
    return logits, features

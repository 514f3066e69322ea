"""The DFlash networks: injection of target features and the block denoiser with its proposals.

Arithmetic: ``dflash`` 0.1.0 ``model.py`` (``DFlashDraftModel``, ``DFlash2DraftModel``); candidate scores and the
residual stream are float32 here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.model.target import split_qkv
from trtllm_dflash.model.weights import ConvWeights, DrafterWeights, LayerWeights
from trtllm_dflash.ops.interface import CacheLayer, Linear, Ops

T = TypeVar("T")

PLAIN_CANDIDATES = 16
"""Candidates per position of a drafter without a selector: the support of its q at temperature > 0."""


def inject_network(
    ops: Ops[T],
    config: DrafterConfig,
    weights: DrafterWeights[T],
    caches: Sequence[CacheLayer[T]],
    *,
    cos_sin: T,
    features: T,
    positions: T,
    slots: T,
) -> None:
    """Project ``features [N, F * H]`` at ``positions [N]`` to every layer's K/V and write them at ``slots [N]``.

    The context path has no input norm: fc → norm → K/V projection, then the K head norm and RoPE; V is plain.
    """
    context = ops.rms_norm(ops.linear(features, weights.fc), weights.feature_norm, config.rms_norm_eps)
    kv = ops.linear(context, weights.inject_kv)
    rows = ops.rotary_rows(cos_sin, positions)
    for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        first = 2 * index * config.num_kv_heads
        k = ops.heads(kv, first, config.num_kv_heads, config.head_dim)
        if layer.attention.k_norm is not None:
            k = ops.rms_norm(k, layer.attention.k_norm, config.rms_norm_eps)
        v = ops.heads(kv, first + config.num_kv_heads, config.num_kv_heads, config.head_dim)
        ops.write_kv(cache, ops.rotary(k, rows), v, slots)


def draft_network(
    ops: Ops[T],
    config: DrafterConfig,
    weights: DrafterWeights[T],
    caches: Sequence[CacheLayer[T]],
    *,
    embedding: T,
    head: Linear[T],
    cos_sin: T,
    anchors: T,
    context_lengths: T,
    block_lengths: T,
    page_table: T,
    temperatures: T,
    uniforms: T,
    block_size: int,
) -> tuple[T, T, T]:
    """Denoise one block per request and choose S-1 proposals; shapes as ``engine.session.DraftInputs``.

    Returns:
        draft tokens ``[B, S-1]``, candidates ``[B, S-1, K]`` and realised q rows ``[B, S-1, K]``; version 1 draws each
        position from its own ``PLAIN_CANDIDATES`` best.
    """
    hidden = backbone(
        ops,
        config,
        weights,
        caches,
        embedding=embedding,
        cos_sin=cos_sin,
        anchors=anchors,
        context_lengths=context_lengths,
        block_lengths=block_lengths,
        page_table=page_table,
        block_size=block_size,
    )
    logits = proposal_logits(ops, config, weights, head, hidden)
    proposals = block_size - 1
    if config.selector is None or weights.selector is None:
        unary, candidates = ops.top_k(logits, min(PLAIN_CANDIDATES, config.draft_vocab_size or config.vocab_size))
        if weights.token_offsets is not None:
            candidates = ops.add_offsets(candidates, weights.token_offsets)
        candidates = ops.per_request(candidates, proposals)
        tokens, q_rows = ops.independent_draw(ops.per_request(unary, proposals), temperatures, uniforms, candidates)
        return tokens, candidates, q_rows
    unary, candidates = ops.top_k(logits, config.selector.top_k)
    candidates = ops.per_request(candidates, proposals)
    tokens, q_rows = ops.selector_walk(
        ops.per_request(unary, proposals),
        candidates,
        ops.per_request(ops.linear(hidden, weights.selector.hidden_projection), proposals),
        weights.selector.predecessor,
        weights.selector.successor,
        anchors,
        temperatures,
        uniforms,
    )
    return tokens, candidates, q_rows


def backbone(
    ops: Ops[T],
    config: DrafterConfig,
    weights: DrafterWeights[T],
    caches: Sequence[CacheLayer[T]],
    *,
    embedding: T,
    cos_sin: T,
    anchors: T,
    context_lengths: T,
    block_lengths: T,
    page_table: T,
    block_size: int,
) -> T:
    """Final-normed states of block rows 1 .. S-1, ``[B * (S-1), H]``, in the compute dtype."""
    plan = ops.plan_block_attention(page_table, context_lengths, block_lengths, block_size)
    rows = ops.rotary_rows(cos_sin, ops.block_positions(context_lengths, block_size))
    hidden = ops.to_float32(ops.embedding(embedding, ops.block_ids(anchors, config.mask_token_id, block_size)))
    if config.input_embedding_scale != 1.0:
        hidden = ops.scale(hidden, config.input_embedding_scale)
    for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        hidden = _drafter_layer(ops, config, layer, cache, hidden, plan, rows, index, block_size)
    return ops.rms_norm(ops.proposal_rows(hidden, block_size), weights.final_norm, config.rms_norm_eps)


def proposal_logits(ops: Ops[T], config: DrafterConfig, weights: DrafterWeights[T], head: Linear[T], hidden: T) -> T:
    """Head logits ``[N, V]`` float32 of drafter states, after multiplier and soft cap."""
    logits = ops.to_float32(ops.linear(hidden, head if weights.own_head is None else weights.own_head))
    if config.output_multiplier != 1.0:
        logits = ops.scale(logits, config.output_multiplier)
    if config.final_logit_softcapping is not None:
        logits = ops.softcap(logits, config.final_logit_softcapping)
    return logits


def _drafter_layer(
    ops: Ops[T],
    config: DrafterConfig,
    layer: LayerWeights[T],
    cache: CacheLayer[T],
    hidden: T,
    plan: object,
    rows: object,
    index: int,
    block_size: int,
) -> T:
    visibility = config.layers[index]

    def attend(x: T) -> T:
        qkv = ops.linear(x, layer.attention.qkv)
        q, k, v = split_qkv(
            ops, qkv, layer, rows, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        mixed = ops.block_attention(
            plan,
            q,
            k,
            v,
            cache,
            scale=config.head_dim**-0.5,
            window=visibility.window,
            causal=visibility.causal,
        )
        return ops.linear(ops.merge_heads(mixed), layer.attention.dense)

    def feed_forward(x: T) -> T:
        return ops.linear(ops.swiglu(ops.linear(x, layer.mlp.gate_up)), layer.mlp.down)

    normed = ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    hidden = ops.add(hidden, _convolved(ops, layer.attention_conv, normed, attend, block_size))
    normed = ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    return ops.add(hidden, _convolved(ops, layer.mlp_conv, normed, feed_forward, block_size))


def _convolved(ops: Ops[T], conv: ConvWeights[T] | None, x: T, sublayer: Callable[[T], T], block_size: int) -> T:
    """``sublayer`` between its two convolutions; one projection of the normed input gives both sides' deltas."""
    if conv is None:
        return sublayer(x)
    dynamic = ops.linear(x, conv.projection)
    side = conv.side_columns
    x = ops.grouped_dynamic_conv(x, ops.columns(dynamic, 0, side), conv.bases[0], block_size)
    y = sublayer(x)
    return ops.grouped_dynamic_conv(y, ops.columns(dynamic, side, side), conv.bases[1], block_size)

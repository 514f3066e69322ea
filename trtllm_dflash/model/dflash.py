"""The DFlash networks: injection of target features and the block denoiser with its proposals.

Arithmetic: ``dflash`` 0.1.0 ``model.py`` (``DFlashDraftModel``, ``DFlash2DraftModel``); candidate scores and the
residual stream are float32 here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.model.weights import ConvWeights, DrafterWeights, LayerWeights
from trtllm_dflash.ops.interface import CacheLayer, HeadLayout, Linear, Ops

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
    ops.inject_kv(
        kv,
        _layout(config),
        [layer.attention.k_norm for layer in weights.layers],
        config.rms_norm_eps,
        ops.rotary_rows(cos_sin, positions),
        caches,
        slots,
    )


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
    logits = ops.linear(hidden, head if weights.own_head is None else weights.own_head)
    unary, candidates = ops.candidates(
        logits, _candidate_count(config), config.output_multiplier, config.final_logit_softcapping
    )
    candidates = ops.per_request(candidates, block_size - 1)
    unary = ops.per_request(unary, block_size - 1)
    if config.selector is None or weights.selector is None:
        if weights.token_offsets is not None:
            candidates = ops.add_offsets(candidates, weights.token_offsets)
        tokens, q_rows = ops.independent_draw(unary, temperatures, uniforms, candidates)
        return tokens, candidates, q_rows
    tokens, q_rows = ops.selector_walk(
        unary,
        candidates,
        ops.per_request(ops.linear(hidden, weights.selector.hidden_projection), block_size - 1),
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
    normed = ops.rms_norm(hidden, weights.layers[0].input_norm, config.rms_norm_eps)
    following = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
    for index, (layer, cache, next_norm) in enumerate(zip(weights.layers, caches, following, strict=True)):
        hidden, normed = _drafter_layer(
            ops, config, layer, cache, hidden, normed, next_norm, plan, rows, index, block_size
        )
    return ops.proposal_rows(normed, block_size)


def _drafter_layer(
    ops: Ops[T],
    config: DrafterConfig,
    layer: LayerWeights[T],
    cache: CacheLayer[T],
    hidden: T,
    normed: T,
    next_norm: T,
    plan: object,
    rows: object,
    index: int,
    block_size: int,
) -> tuple[T, T]:
    """One layer: the residual stream and its norm for whatever follows."""
    visibility = config.layers[index]
    attention, eps = layer.attention, config.rms_norm_eps

    def attend(x: T) -> T:
        qkv = ops.linear(x, attention.qkv)
        q, k, v = ops.rotate_qkv(qkv, _layout(config), attention.q_norm, attention.k_norm, eps, rows)
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
        return ops.linear(ops.merge_heads(mixed), attention.dense)

    def feed_forward(x: T) -> T:
        return ops.linear(ops.gated(x, layer.mlp.gate_up), layer.mlp.down)

    hidden, normed = _sublayer(ops, layer.attention_conv, hidden, normed, attend, layer.post_norm, eps, block_size)
    return _sublayer(ops, layer.mlp_conv, hidden, normed, feed_forward, next_norm, eps, block_size)


def _sublayer(
    ops: Ops[T],
    conv: ConvWeights[T] | None,
    hidden: T,
    normed: T,
    compute: Callable[[T], T],
    next_norm: T,
    eps: float,
    block_size: int,
) -> tuple[T, T]:
    """``hidden + sublayer(normed)`` and its norm; DFlash 2 puts the sublayer between two convolutions whose deltas come
    from one projection of the normed input."""
    if conv is None:
        return ops.add_rms_norm(hidden, compute(normed), next_norm, eps)
    dynamic = ops.linear(normed, conv.projection)
    side = conv.side_columns
    mixed = ops.grouped_dynamic_conv(normed, ops.columns(dynamic, 0, side), conv.bases[0], block_size)
    out_side = ops.columns(dynamic, side, side)
    return ops.conv_add_rms_norm(hidden, compute(mixed), out_side, conv.bases[1], block_size, next_norm, eps)


def _layout(config: DrafterConfig) -> HeadLayout:
    return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)


def _candidate_count(config: DrafterConfig) -> int:
    if config.selector is not None:
        return config.selector.top_k
    return min(PLAIN_CANDIDATES, config.draft_vocab_size or config.vocab_size)

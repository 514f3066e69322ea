"""Emitting the three networks: what they are is said here once, where their rows lie is the lowering's business."""

from __future__ import annotations

from typing import Any

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import (
    EmittedNetwork,
    NetworkRequest,
    new_network,
    rank_drafter,
    rank_target,
    rotary_inputs,
)
from trtllm_dflash.engine.tensorrt_native_emit import LinearInputs
from trtllm_dflash.engine.tensorrt_placement import LoweredInputs
from trtllm_dflash.engine.tensorrt_plugin_emit import PagedInputs
from trtllm_dflash.model.dflash import draft_network, inject_network
from trtllm_dflash.model.target import target_network
from trtllm_dflash.model.weights import drafter_weights, target_weights


def emit_network(request: NetworkRequest, name: Network) -> EmittedNetwork:
    """Emit network ``name`` in the request's lowering; its inputs are described in ``docs/tensorrt.md``.

    Raises:
        BuildError: TensorRT or a plugin refused a layer, or cannot do what the checkpoint asks for.
    """
    emitted = new_network(request, name)
    native = request.lowering == "native"
    lowered: LoweredInputs = LinearInputs(request, emitted) if native else PagedInputs(request, emitted)
    emit = {"target": _target, "inject": _inject, "draft": _draft}[name]
    emit(request, emitted, lowered)
    emitted.cache_outputs(lowered.ops.updated)
    emitted.profiles = lowered.profiles(name)
    return emitted.finish()


def _target(request: NetworkRequest, emitted: EmittedNetwork, lowered: LoweredInputs) -> None:
    int32, ops = request.library.trt.int32, lowered.ops
    config = rank_target(request)
    source = emitted.weights(request, "target")
    ids = emitted.input("input_ids", int32, *lowered.tokens)
    where = lowered.target()
    logit_rows = emitted.input("logit_rows", int32, *lowered.logit_rows)
    table: Any = rotary_inputs(emitted, lowered.positions, config.rope.rotary_dim)
    shape = lowered.cache_shape(config.num_kv_heads, config.head_dim)
    logits, features = target_network(
        ops,
        config,
        target_weights(config, source),
        emitted.caches(request, config.num_layers, shape),
        cos_sin=table,
        input_ids=ids,
        positions=where.positions,
        slots=where.slots,
        page_table=where.page_table,
        context_lengths=where.context_lengths,
        query_starts=where.query_starts,
        logit_rows=logit_rows,
        max_query=where.max_query,
        queries_per_request=None,
        total_queries=-1,
        capture_layers=() if request.drafter_config is None else request.drafter_config.target_layer_ids,
    )
    emitted.writer.output("logits", ops.whole(logits))
    if features is not None:
        emitted.writer.near = "features"
        emitted.writer.output("features", ops.whole(features))


def _inject(request: NetworkRequest, emitted: EmittedNetwork, lowered: LoweredInputs) -> None:
    config, ops = rank_drafter(request), lowered.ops
    source = emitted.weights(request, "drafter")
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = emitted.input("features", emitted.writer.dtype(request.dtype), *lowered.tokens, width)
    where = lowered.inject()
    table: Any = rotary_inputs(emitted, lowered.positions, config.rope.rotary_dim)
    shape = lowered.cache_shape(config.num_kv_heads, config.head_dim)
    inject_network(
        ops,
        config,
        drafter_weights(config, source),
        emitted.caches(request, config.num_layers, shape),
        cos_sin=table,
        features=features,
        positions=where.positions,
        slots=where.slots,
    )
    ops.finish_writes()


def _draft(request: NetworkRequest, emitted: EmittedNetwork, lowered: LoweredInputs) -> None:
    trt, ops = request.library.trt, lowered.ops
    config = rank_drafter(request)
    block = request.limits.block_size
    source, shared = emitted.weights(request, "drafter"), emitted.weights(request, "target")
    anchors = emitted.input("anchors", trt.int32, "B")
    context = emitted.input("context_lengths", trt.int32, "B")
    lengths = emitted.input("block_lengths", trt.int32, "B")
    emitted.writer.near = "block"
    page_table = lowered.draft(context, lengths, block)
    temperatures = emitted.input("temperatures", trt.float32, "B")
    uniforms = emitted.input("uniforms", trt.float32, "B", block - 1)
    table: Any = rotary_inputs(emitted, lowered.positions, config.rope.rotary_dim)
    shape = lowered.cache_shape(config.num_kv_heads, config.head_dim)
    head = "lm_head" if shared.has("lm_head.weight") else "transformer.vocab_embedding"
    tokens, candidates, q_rows = draft_network(
        ops,
        config,
        drafter_weights(config, source),
        emitted.caches(request, config.num_layers, shape),
        embedding=shared.tensor("transformer.vocab_embedding.weight"),
        head=shared.linear([head]),
        cos_sin=table,
        anchors=anchors,
        context_lengths=context,
        block_lengths=lengths,
        page_table=page_table,
        temperatures=temperatures,
        uniforms=uniforms,
        block_size=block,
    )
    emitted.writer.near = "outputs"
    for name, tensor in (("draft_tokens", tokens), ("candidates", candidates), ("q_rows", q_rows)):
        emitted.writer.output(name, ops.whole(tensor))

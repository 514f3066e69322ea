"""The three networks in the native lowering: linear caches, one cache row per request, tokens ``[B, S]``."""

from __future__ import annotations

from typing import Any

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import (
    EmittedNetwork,
    NetworkRequest,
    Profile,
    linear_row_tokens,
    new_network,
    prefill_queries,
    rank_drafter,
    rank_target,
    rotary_inputs,
)
from trtllm_dflash.model.dflash import draft_network, inject_network
from trtllm_dflash.model.target import target_network
from trtllm_dflash.model.weights import drafter_weights, target_weights
from trtllm_dflash.ops.tensorrt_native import LinearPass, NativeOps
from trtllm_dflash.ops.tensorrt_network import Columns

# Prefill is one request at a time; half the largest chunk is what a typical prompt needs.
_PREFILL_OPTIMUM = 512
_FIRST_BUCKET, _BUCKET_GROWTH = 4, 8


def emit_native(request: NetworkRequest, name: Network) -> EmittedNetwork:
    """Emit one network.

    Inputs (B cache rows, S tokens of each, int32 unless said otherwise): see ``docs/tensorrt.md``.

    Raises:
        BuildError: TensorRT refused a layer.
    """
    emit = {"target": _target, "inject": _inject, "draft": _draft}[name]
    return emit(request)


def _target(request: NetworkRequest) -> EmittedNetwork:
    emitted = new_network(request, "target")
    trt = request.library.trt
    config = rank_target(request)
    ops = NativeOps(emitted.writer, emitted.writer.dtype(request.dtype), ranks=request.ranks)
    source = emitted.weights(request, "target")
    rows = linear_row_tokens(request.limits)
    emitted.row_tokens = rows
    ids = emitted.input("input_ids", trt.int32, "B", "S")
    where = _linear_pass(emitted, with_lengths=True)
    logit_rows = emitted.input("logit_rows", trt.int32, "B", "R")
    tables = rotary_inputs(emitted, rows, config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, ("B", config.num_kv_heads, rows, config.head_dim))
    # The operation set speaks of pages and packed rows; in this lowering a LinearPass stands for both.
    placement: Any = where
    table: Any = tables
    logits, features = target_network(
        ops,
        config,
        target_weights(config, source),
        caches,
        cos_sin=table,
        input_ids=ids,
        positions=Columns((where.positions,)),
        slots=placement,
        page_table=placement,
        context_lengths=placement,
        query_starts=placement,
        logit_rows=logit_rows,
        max_query=prefill_queries(request.limits),
        queries_per_request=None,
        total_queries=-1,
        capture_layers=() if request.drafter_config is None else request.drafter_config.target_layer_ids,
    )
    emitted.writer.output("logits", ops.whole(logits))
    if features is not None:
        emitted.writer.near = "features"
        emitted.writer.output("features", ops.whole(features))
    emitted.cache_outputs(ops.updated)
    emitted.profiles = _profiles(request)
    return emitted.finish(source)


def _inject(request: NetworkRequest) -> EmittedNetwork:
    emitted = new_network(request, "inject")
    config = rank_drafter(request)
    dtype = emitted.writer.dtype(request.dtype)
    ops = NativeOps(emitted.writer, dtype, ranks=request.ranks)
    source = emitted.weights(request, "drafter")
    rows = linear_row_tokens(request.limits)
    emitted.row_tokens = rows
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = emitted.input("features", dtype, "B", "S", width)
    where = _linear_pass(emitted, with_lengths=False)
    table: Any = rotary_inputs(emitted, rows, config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, ("B", config.num_kv_heads, rows, config.head_dim))
    placement: Any = where
    weights = drafter_weights(config, source)
    inject_network(
        ops,
        config,
        weights,
        caches,
        cos_sin=table,
        features=features,
        positions=Columns((where.positions,)),
        slots=placement,
    )
    emitted.cache_outputs(ops.updated)
    emitted.profiles = _profiles(request)
    return emitted.finish(source)


def _draft(request: NetworkRequest) -> EmittedNetwork:
    emitted = new_network(request, "draft")
    trt = request.library.trt
    config = rank_drafter(request)
    block = request.limits.block_size
    w = emitted.writer
    ops = NativeOps(w, w.dtype(request.dtype), ranks=request.ranks)
    source, shared = emitted.weights(request, "drafter"), emitted.weights(request, "target")
    rows = linear_row_tokens(request.limits)
    emitted.row_tokens = rows
    anchors = emitted.input("anchors", trt.int32, "B")
    context = emitted.input("context_lengths", trt.int32, "B")
    lengths = emitted.input("block_lengths", trt.int32, "B")
    starts = emitted.input("write_starts", trt.int32, "B")
    temperatures = emitted.input("temperatures", trt.float32, "B")
    uniforms = emitted.input("uniforms", trt.float32, "B", block - 1)
    table: Any = rotary_inputs(emitted, rows, config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, ("B", config.num_kv_heads, rows, config.head_dim))
    w.near = "block"
    placement: Any = LinearPass(
        positions=ops.block_positions(context, block).parts[0],
        write_starts=starts.parts[0],
        key_lengths=w.elementwise("SUM", context.parts[0], lengths.parts[0]),
    )
    head = "lm_head" if shared.has("lm_head.weight") else "transformer.vocab_embedding"
    tokens, candidates, q_rows = draft_network(
        ops,
        config,
        drafter_weights(config, source),
        caches,
        embedding=shared.tensor("transformer.vocab_embedding.weight"),
        head=shared.linear([head]),
        cos_sin=table,
        anchors=anchors,
        context_lengths=context,
        block_lengths=lengths,
        page_table=placement,
        temperatures=temperatures,
        uniforms=uniforms,
        block_size=block,
    )
    w.near = "outputs"
    w.output("draft_tokens", ops.whole(tokens))
    w.output("candidates", ops.whole(candidates))
    w.output("q_rows", ops.whole(q_rows))
    emitted.cache_outputs(ops.updated)
    emitted.profiles = [profile for profile in _profiles(request) if profile.name != "prefill"]
    return emitted.finish(source, shared)


def _linear_pass(emitted: EmittedNetwork, *, with_lengths: bool) -> LinearPass:
    int32 = emitted.writer.trt.int32
    positions = emitted.input("positions", int32, "B", "S").parts[0]
    starts = emitted.input("write_starts", int32, "B").parts[0]
    lengths = emitted.input("key_lengths", int32, "B").parts[0] if with_lengths else None
    return LinearPass(positions, starts, lengths)


def _profiles(request: NetworkRequest) -> list[Profile]:
    """Prefill of one row, then verify in buckets of rows up to every slot and the scratch row."""
    limits = request.limits
    longest, block = prefill_queries(limits), limits.block_size
    one = (1, 1, 1)
    profiles = [Profile("prefill", {"B": one, "S": (1, min(_PREFILL_OPTIMUM, longest), longest), "R": one})]
    smallest = 1
    for largest in row_buckets(limits.max_batch_size + 1):
        rows = (smallest, largest, largest)
        profiles.append(Profile(f"verify up to {largest}", {"B": rows, "S": (1, block, block), "R": (1, block, block)}))
        smallest = largest + 1
    return profiles


def row_buckets(most: int) -> list[int]:
    """Largest number of cache rows of each verify profile; buckets grow eightfold, a short rest joins the last."""
    buckets, bucket = [], _FIRST_BUCKET
    while 2 * bucket <= most:
        buckets.append(bucket)
        bucket *= _BUCKET_GROWTH
    return [*buckets, most]

"""The three networks in the plugin lowering: packed rows, paged caches that layers update in place."""

from __future__ import annotations

from typing import Any

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import (
    EmittedNetwork,
    NetworkRequest,
    Profile,
    new_network,
    rank_drafter,
    rank_target,
    rotary_inputs,
)
from trtllm_dflash.errors import BuildError
from trtllm_dflash.model.dflash import draft_network, inject_network
from trtllm_dflash.model.target import target_network
from trtllm_dflash.model.weights import drafter_weights, target_weights
from trtllm_dflash.ops.tensorrt_plugin import PluginOps

_PREFILL_OPTIMUM = 512


def emit_plugin(request: NetworkRequest, name: Network) -> EmittedNetwork:
    """Emit one network.

    Inputs (T packed tokens, B requests, P pages of each, C pages of the caches with the scratch page, R logit rows;
    int32 unless said otherwise): see ``docs/tensorrt.md``.

    Raises:
        BuildError: TensorRT or a plugin refused a layer, or this TensorRT has no plugin layers.
    """
    emit = {"target": _target, "inject": _inject, "draft": _draft}[name]
    return emit(request)


def _operations(request: NetworkRequest, emitted: EmittedNetwork) -> PluginOps:
    if request.plugins is None or not hasattr(emitted.network, "add_plugin_v3"):
        raise BuildError(
            f"network {emitted.name}: {request.library.backend} has no plugin layers",
            hint="the plugin lowering needs full TensorRT 11 and the compiled plugin library",
        )
    return PluginOps(emitted.writer, emitted.writer.dtype(request.dtype), ranks=request.ranks, plugins=request.plugins)


def _target(request: NetworkRequest) -> EmittedNetwork:
    emitted = new_network(request, "target")
    int32 = request.library.trt.int32
    config = rank_target(request)
    ops = _operations(request, emitted)
    source = emitted.weights(request, "target")
    ids = emitted.input("input_ids", int32, "T")
    positions = emitted.input("positions", int32, "T")
    slots = emitted.input("slots", int32, "T")
    page_table = emitted.input("page_table", int32, "B", "P")
    context = emitted.input("context_lengths", int32, "B")
    starts = emitted.input("query_starts", int32, "Q")
    logit_rows = emitted.input("logit_rows", int32, "R")
    table: Any = rotary_inputs(emitted, _positions(request), config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, _pool(request, config.num_kv_heads, config.head_dim))
    logits, features = target_network(
        ops,
        config,
        target_weights(config, source),
        caches,
        cos_sin=table,
        input_ids=ids,
        positions=positions,
        slots=slots,
        page_table=page_table,
        context_lengths=context,
        query_starts=starts,
        logit_rows=logit_rows,
        max_query=0,
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
    int32 = request.library.trt.int32
    config = rank_drafter(request)
    ops = _operations(request, emitted)
    source = emitted.weights(request, "drafter")
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = emitted.input("features", emitted.writer.dtype(request.dtype), "T", width)
    positions = emitted.input("positions", int32, "T")
    slots = emitted.input("slots", int32, "T")
    table: Any = rotary_inputs(emitted, _positions(request), config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, _pool(request, config.num_kv_heads, config.head_dim))
    inject_network(
        ops,
        config,
        drafter_weights(config, source),
        caches,
        cos_sin=table,
        features=features,
        positions=positions,
        slots=slots,
    )
    ops.finish_writes()
    emitted.cache_outputs(ops.updated)
    emitted.profiles = _profiles(request)
    return emitted.finish(source)


def _draft(request: NetworkRequest) -> EmittedNetwork:
    emitted = new_network(request, "draft")
    trt = request.library.trt
    config = rank_drafter(request)
    block = request.limits.block_size
    ops = _operations(request, emitted)
    source, shared = emitted.weights(request, "drafter"), emitted.weights(request, "target")
    anchors = emitted.input("anchors", trt.int32, "B")
    context = emitted.input("context_lengths", trt.int32, "B")
    lengths = emitted.input("block_lengths", trt.int32, "B")
    page_table = emitted.input("page_table", trt.int32, "B", "P")
    temperatures = emitted.input("temperatures", trt.float32, "B")
    uniforms = emitted.input("uniforms", trt.float32, "B", block - 1)
    table: Any = rotary_inputs(emitted, _positions(request), config.rope.rotary_dim)
    caches = emitted.caches(request, config.num_layers, _pool(request, config.num_kv_heads, config.head_dim))
    head = "lm_head" if shared.has("lm_head.weight") else "transformer.vocab_embedding"
    emitted.writer.near = "block"
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
        page_table=page_table,
        temperatures=temperatures,
        uniforms=uniforms,
        block_size=block,
    )
    emitted.writer.near = "outputs"
    emitted.writer.output("draft_tokens", ops.whole(tokens))
    emitted.writer.output("candidates", ops.whole(candidates))
    emitted.writer.output("q_rows", ops.whole(q_rows))
    emitted.profiles = [profile for profile in _profiles(request) if profile.name != "prefill"]
    return emitted.finish(source, shared)


def _positions(request: NetworkRequest) -> int:
    return request.limits.max_seq_len + request.limits.block_size


def _pool(request: NetworkRequest, kv_heads: int, head_dim: int) -> tuple[int | str, ...]:
    return ("C", request.limits.page_tokens, kv_heads, head_dim)


def _profiles(request: NetworkRequest) -> list[Profile]:
    """Prefill of any requests within the token budget, and verify of every running request."""
    limits = request.limits
    batch, block = limits.max_batch_size, limits.block_size
    pages = -(-limits.max_seq_len // limits.page_tokens)
    half = max(1, pages // 2)
    pool = (2, batch * half + 1, batch * pages + 1)
    shared = {"B": (1, batch, batch), "Q": (2, batch + 1, batch + 1), "P": (1, half, pages), "C": pool}
    tokens = limits.max_num_tokens
    prefill = {"T": (1, min(_PREFILL_OPTIMUM, tokens), tokens), "R": (1, 1, batch), **shared}
    verify = {"T": (1, batch * block, batch * block), "R": (1, batch * block, batch * block), **shared}
    return [Profile("prefill", prefill), Profile("verify", verify)]

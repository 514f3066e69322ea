"""Attention, KV injection and the small fused kernels on torch CUDA tensors.

Thin ctypes bindings of ``plugins/include/dflash_kernels.h``: they check what a kernel cannot check (devices, shapes,
contiguity), fill the parameter block and launch on the current stream. Nothing here synchronises; everything may run
under CUDA graph capture. Windows are given as in ``config.DrafterLayerAttention``: key k is seen when
``|q - k| <= window - 1``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import load_library

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
_MAX_INJECT_LAYERS = 64


class _AttentionParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "kv_dtype", "index_bytes", "batch")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "page_tokens")),
        *((name, ctypes.c_int32) for name in ("pages_per_request", "max_query", "block_size", "causal")),
        *((name, ctypes.c_int32) for name in ("window_left", "window_right", "max_splits")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "k_block", "v_block", "sinks")),
        *((name, ctypes.c_void_p) for name in ("page_table", "context_lengths", "query_starts", "block_lengths")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_stride", "out_stride", "block_stride", "page_table_stride")),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("context_settled", "reserved")),
    )


class _InjectParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "index_bytes", "rows", "layers")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "head_dim", "rotary_dim")),
        ("eps", ctypes.c_float),
        ("kv", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token_stride", "layer_stride", "v_offset")),
        *((name, ctypes.c_void_p) for name in ("k_norm_weight", "cos_sin", "positions", "slots")),
        ("k_caches", ctypes.c_void_p * _MAX_INJECT_LAYERS),
        ("v_caches", ctypes.c_void_p * _MAX_INJECT_LAYERS),
        ("k_inverse_scale", ctypes.c_float * _MAX_INJECT_LAYERS),
        ("v_inverse_scale", ctypes.c_float * _MAX_INJECT_LAYERS),
    )


class _QkRopeParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "index_bytes", "tokens")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        ("eps", ctypes.c_float),
        ("qkv", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("q_norm_weight", "k_norm_weight", "cos_sin", "positions", "slots")),
        ("q_out", ctypes.c_void_p),
        ("q_out_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
        *((name, ctypes.c_float) for name in ("k_inverse_scale", "v_inverse_scale")),
        ("settled", ctypes.c_int32),
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    max_query: int,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_splits: int = 0,
    context_settled: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed queries over the cache, whose rows for this pass are already written.

    Args:
        q: ``[T, heads, head_dim]`` bfloat16 or float16; may be a slice of a wider projection.
        k_cache, v_cache: ``[pages + 1, page_tokens, kv_heads, head_dim]``, dtype of q or float8_e4m3fn.
        page_table: ``[B, P]``, context_lengths ``[B]``, query_starts ``[B + 1]``: int32 or int64, all the same.
        max_query: host-known bound of queries per request.
        scale: factor on q·k. softcap: ``tanh(s / softcap) * softcap`` after the scale.
        window: see the module. sinks: ``[heads]`` float32 logits that join each softmax.
        k_scale, v_scale: real value = stored float8 value * scale.
        max_splits: 0 = chosen; 1 = no split; above = that many (tests, tuning).
        context_settled: the kernel may read the index tensors and the cache rows below ``context_lengths`` before the
            launch in front of it has finished. Only if no launch since the last one that does not overlap its
            predecessor (any launch of torch is such) writes them; q and later cache rows may come from the launch in
            front.
        out: ``[T, heads, head_dim]`` to write into.

    Returns:
        ``[T, heads, head_dim]``; rows that see no key are zero.

    Raises:
        EngineError: tensors that do not fit each other, or a shape no kernel was compiled for.
    """
    params = _attention_params(q, k_cache, v_cache, page_table, context_lengths, out)
    _require(query_starts.shape == (page_table.shape[0] + 1,), "query_starts", query_starts, "[B + 1]")
    params.max_query = max_query
    params.query_starts = _index_pointer(query_starts, "query_starts", page_table)
    return _attend(params, q, out, scale, window, causal, softcap, sinks, k_scale, v_scale, max_splits, context_settled)


def block_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    block_lengths: Tensor | None,
    block_size: int,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_splits: int = 0,
    context_settled: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one block of S rows per request over cached context plus the block's own K/V.

    Args:
        q: ``[B * S, heads, head_dim]``. k_block, v_block: ``[B * S, kv_heads, head_dim]`` of q's dtype; never written
            to the cache. With a float8 cache they are rounded to float8 by the same scales.
        block_lengths: ``[B]`` rows of the block that exist, None = all S.
        Others as in :func:`paged_attention`.

    Returns:
        ``[B * S, heads, head_dim]``. Rows beyond a request's block length hold finite values of no meaning.
    """
    params = _attention_params(q, k_cache, v_cache, page_table, context_lengths, out)
    expected = (page_table.shape[0] * block_size, k_cache.shape[2], q.shape[2])
    for name, rows in (("k_block", k_block), ("v_block", v_block)):
        _require(
            tuple(rows.shape) == expected and rows.dtype == q.dtype and _rows_are_dense(rows),
            name,
            rows,
            f"{list(expected)} of {q.dtype}, heads and head_dim contiguous",
        )
    _require(q.shape[0] == expected[0], "q", q, f"{expected[0]} rows")
    _require(k_block.stride(0) == v_block.stride(0), "v_block", v_block, "the token stride of k_block")
    params.block_size = block_size
    params.k_block, params.v_block = k_block.data_ptr(), v_block.data_ptr()
    params.block_stride = k_block.stride(0)
    if block_lengths is not None:
        params.block_lengths = _index_pointer(block_lengths, "block_lengths", page_table)
    return _attend(params, q, out, scale, window, causal, softcap, sinks, k_scale, v_scale, max_splits, context_settled)


def inject_kv(
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_norm_weight: Tensor | None,
    eps: float,
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    *,
    k_scales: Sequence[float] | None = None,
    v_scales: Sequence[float] | None = None,
) -> None:
    """K norm, RoPE and paged write of K and V for all drafter layers in one launch.

    Args:
        kv: ``[N, layers, 2, kv_heads, head_dim]`` (K then V), the stacked projection of all layers.
        positions, slots: ``[N]`` int32 or int64; slot -1 drops the row.
        cos_sin: ``[max_positions, rotary_dim]`` float32, cos half then sin half.
        k_norm_weight: ``[layers, head_dim]`` of kv's dtype, or None.
        k_caches, v_caches: one ``[pages + 1, page_tokens, kv_heads, head_dim]`` per layer.
        k_scales, v_scales: per layer, for a float8 cache: stored = real / scale.
    """
    _require(kv.dim() == 5 and kv.shape[2] == 2, "kv", kv, "[N, layers, 2, kv_heads, head_dim]")
    rows, layers, _, kv_heads, head_dim = kv.shape
    _require(kv[0:1, 0, 0].is_contiguous(), "kv", kv, "heads and head_dim contiguous")
    _require(layers <= _MAX_INJECT_LAYERS, "kv", kv, f"at most {_MAX_INJECT_LAYERS} layers")
    _require(positions.shape == slots.shape == (rows,), "slots", slots, f"[{rows}], as positions")
    _require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", cos_sin, "contiguous float32")
    if len(k_caches) != layers or len(v_caches) != layers:
        raise EngineError(f"inject_kv: {len(k_caches)} and {len(v_caches)} caches for {layers} layers")
    params = _InjectParams(struct_size=ctypes.sizeof(_InjectParams))
    params.dtype, params.cache_dtype = _dtype(kv, "kv"), _dtype(k_caches[0], "k_caches")
    params.index_bytes = slots.element_size()
    params.rows, params.layers, params.num_kv_heads, params.head_dim = rows, layers, kv_heads, head_dim
    params.rotary_dim, params.eps = cos_sin.shape[1], eps
    params.kv = kv.data_ptr()
    params.token_stride, params.layer_stride, params.v_offset = kv.stride()[:3]
    if k_norm_weight is not None:
        _require(
            k_norm_weight.dtype == kv.dtype and k_norm_weight.is_contiguous() and k_norm_weight.shape[-1] == head_dim,
            "k_norm_weight",
            k_norm_weight,
            f"[{layers}, {head_dim}] of {kv.dtype}",
        )
        params.k_norm_weight = k_norm_weight.data_ptr()
    params.cos_sin = cos_sin.data_ptr()
    params.positions, params.slots = _index_pointer(positions, "positions", slots), slots.data_ptr()
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        for cache in (k_cache, v_cache):
            _check_cache(cache, k_caches[0], kv_heads, head_dim)
        params.k_caches[layer], params.v_caches[layer] = k_cache.data_ptr(), v_cache.data_ptr()
        params.k_inverse_scale[layer] = 1.0 / k_scales[layer] if k_scales else 1.0
        params.v_inverse_scale[layer] = 1.0 / v_scales[layer] if v_scales else 1.0
    launch = load_library().function("dflash_inject_kv", (ctypes.POINTER(_InjectParams), ctypes.c_void_p))
    launch(ctypes.byref(params), _stream(kv))


def qk_norm_rope_write(
    qkv: Tensor,
    num_heads: int,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    settled: bool = False,
) -> Tensor:
    """Between a layer's QKV projection and attention: norm and rotate q and k, write K and V to the cache.

    Args:
        qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, queries, keys, values.
        q_norm_weight, k_norm_weight: ``[head_dim]`` of qkv's dtype, or None. Others as in :func:`inject_kv`.
        settled: no launch since the last one that does not overlap its predecessor writes positions or slots, so that
            they may be read early. Norm weights always are.

    Returns:
        Rotated queries ``[T, heads, head_dim]``.
    """
    kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    width = (num_heads + 2 * kv_heads) * head_dim
    _require(qkv.dim() == 2 and qkv.shape[1] == width and qkv.stride(1) == 1, "qkv", qkv, f"[T, {width}]")
    _require(positions.shape == slots.shape == (qkv.shape[0],), "slots", slots, f"[{qkv.shape[0]}], as positions")
    _require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", cos_sin, "contiguous float32")
    for cache in (k_cache, v_cache):
        _check_cache(cache, k_cache, kv_heads, head_dim)
    out = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    params = _QkRopeParams(struct_size=ctypes.sizeof(_QkRopeParams))
    params.dtype, params.cache_dtype = _dtype(qkv, "qkv"), _dtype(k_cache, "k_cache")
    params.index_bytes = slots.element_size()
    params.tokens, params.num_heads, params.num_kv_heads = qkv.shape[0], num_heads, kv_heads
    params.head_dim, params.rotary_dim, params.eps = head_dim, cos_sin.shape[1], eps
    params.qkv, params.qkv_stride = qkv.data_ptr(), qkv.stride(0)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            _require(weight.dtype == qkv.dtype and weight.shape == (head_dim,), name, weight, f"[{head_dim}]")
            setattr(params, name, weight.data_ptr())
    params.cos_sin = cos_sin.data_ptr()
    params.positions, params.slots = _index_pointer(positions, "positions", slots), slots.data_ptr()
    params.q_out, params.q_out_stride = out.data_ptr(), out.stride(0)
    params.k_cache, params.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    params.k_inverse_scale, params.v_inverse_scale = 1.0 / k_scale, 1.0 / v_scale
    params.settled = settled
    launch = load_library().function("dflash_qk_norm_rope_write", (ctypes.POINTER(_QkRopeParams), ctypes.c_void_p))
    launch(ctypes.byref(params), _stream(qkv))
    return out


def add_rms_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, *, kept: Tensor | None = None
) -> Tensor:
    """``residual += x`` in place, then RMSNorm of the residual.

    Args:
        x: ``[N, H]`` of the weight's dtype, or None for a plain norm.
        residual: ``[N, H]`` of the weight's dtype or float32. weight: ``[H]`` bfloat16 or float16, no result of a
            launch that may still run.
        kept: ``[N, H]`` of the residual's dtype, rows may be a slice of wider ones: the new residual, once more.

    Returns:
        ``[N, H]`` of the weight's dtype.
    """
    rows, width = residual.shape
    if kept is not None:
        _require(
            kept.shape == residual.shape and kept.dtype == residual.dtype and kept.stride(1) == 1,
            "kept",
            kept,
            f"{list(residual.shape)} of {residual.dtype} with dense rows",
        )
    _require(residual.is_contiguous(), "residual", residual, "contiguous")
    _require(weight.shape == (width,), "weight", weight, f"[{width}]")
    if x is not None:
        _require(
            x.shape == residual.shape and x.dtype == weight.dtype and x.is_contiguous(),
            "x",
            x,
            f"contiguous {list(residual.shape)} of {weight.dtype}",
        )
    out = torch.empty(rows, width, dtype=weight.dtype, device=residual.device)
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    launch = load_library().function(
        "dflash_add_rms_norm",
        (*[integer] * 2, *[pointer] * 5, ctypes.c_int64, integer, integer, ctypes.c_float, pointer),
    )
    launch(
        _dtype(weight, "weight"),
        _dtype(residual, "residual"),
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        None if kept is None else kept.data_ptr(),
        0 if kept is None else kept.stride(0),
        rows,
        width,
        eps,
        _stream(residual),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``[N, 2 I]`` (gate first, then up) → ``silu(gate) * up``, ``[N, I]``."""
    _require(gate_up.dim() == 2 and gate_up.is_contiguous(), "gate_up", gate_up, "contiguous [N, 2 I]")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    launch = load_library().function(
        "dflash_swiglu",
        (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p),
    )
    launch(_dtype(gate_up, "gate_up"), gate_up.data_ptr(), out.data_ptr(), rows, width, _stream(gate_up))
    return out


def _attention_params(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, context_lengths: Tensor, out: Tensor | None
) -> _AttentionParams:
    _require(q.dim() == 3 and _rows_are_dense(q), "q", q, "[T, heads, head_dim], heads and head_dim contiguous")
    for cache in (k_cache, v_cache):
        _check_cache(cache, k_cache, k_cache.shape[2], q.shape[2])
    _require(page_table.dim() == 2 and page_table.stride(1) == 1, "page_table", page_table, "[B, P]")
    _require(context_lengths.shape == page_table.shape[:1], "context_lengths", context_lengths, "[B]")
    if out is not None:
        _require(out.shape == q.shape and out.dtype == q.dtype and _rows_are_dense(out), "out", out, "like q")
    params = _AttentionParams(struct_size=ctypes.sizeof(_AttentionParams))
    params.dtype, params.kv_dtype = _dtype(q, "q"), _dtype(k_cache, "k_cache")
    params.index_bytes = page_table.element_size()
    params.batch, params.pages_per_request = page_table.shape
    params.num_heads, params.head_dim = q.shape[1:]
    params.page_tokens, params.num_kv_heads = k_cache.shape[1:3]
    params.q, params.q_stride = q.data_ptr(), q.stride(0)
    params.k_cache, params.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    params.page_table, params.page_table_stride = page_table.data_ptr(), page_table.stride(0)
    params.context_lengths = _index_pointer(context_lengths, "context_lengths", page_table)
    return params


def _attend(
    params: _AttentionParams,
    q: Tensor,
    out: Tensor | None,
    scale: float,
    window: int | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: float,
    v_scale: float,
    max_splits: int,
    context_settled: bool,
) -> Tensor:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    distance = -1 if window is None else window - 1
    params.causal, params.window_left, params.window_right = int(causal), distance, distance
    params.max_splits = max_splits
    params.context_settled = int(context_settled)
    params.scale, params.softcap = scale, softcap or 0.0
    params.k_scale, params.v_scale = k_scale, v_scale
    if sinks is not None:
        _require(sinks.shape == (q.shape[1],) and sinks.dtype == torch.float32, "sinks", sinks, "[heads] float32")
        params.sinks = sinks.data_ptr()
    params.out, params.out_stride = out.data_ptr(), out.stride(0)
    if q.shape[0] == 0 or params.batch == 0:
        return out
    library = load_library()
    measure = library.handle.dflash_attention_workspace_bytes
    measure.argtypes, measure.restype = (ctypes.POINTER(_AttentionParams),), ctypes.c_int64
    needed = measure(ctypes.byref(params))
    if needed < 0:
        raise EngineError(f"attention: {library.last_error()}")
    if needed > 0:
        # Freed to the stream-ordered allocator on return: the next user on this stream comes after the kernel.
        workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
        params.workspace, params.workspace_bytes = workspace.data_ptr(), needed
    launch = library.function("dflash_attention", (ctypes.POINTER(_AttentionParams), ctypes.c_void_p))
    launch(ctypes.byref(params), _stream(q))
    return out


def _check_cache(cache: Tensor, like: Tensor, kv_heads: int, head_dim: int) -> None:
    _require(
        cache.dim() == 4 and cache.is_contiguous() and cache.dtype == like.dtype and cache.shape == like.shape,
        "cache",
        cache,
        f"contiguous {list(like.shape)} of {like.dtype}",
    )
    _require(tuple(cache.shape[2:]) == (kv_heads, head_dim), "cache", cache, f"[…, …, {kv_heads}, {head_dim}]")


def _rows_are_dense(x: Tensor) -> bool:
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


def _dtype(x: Tensor, name: str) -> int:
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise EngineError(f"{name}: has dtype {x.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    return code


def _index_pointer(indices: Tensor, name: str, like: Tensor) -> int:
    _require(
        indices.dtype == like.dtype and indices.dtype in (torch.int32, torch.int64) and indices.is_contiguous(),
        name,
        indices,
        f"contiguous int32 or int64, {like.dtype} like its companions",
    )
    return indices.data_ptr()


def _stream(x: Tensor) -> int:
    if x.device.type != "cuda":
        raise EngineError(f"the CUDA kernels need CUDA tensors, got one on {x.device}")
    return torch.cuda.current_stream(x.device).cuda_stream


def _require(holds: bool, name: str, found: Tensor, expected: str) -> None:
    if not holds:
        raise EngineError(
            f"{name}: is {found.dtype} {list(found.shape)} with strides {list(found.stride())}, expected {expected}"
        )

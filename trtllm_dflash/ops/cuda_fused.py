"""KV injection and the small fused kernels of the plugin library on torch CUDA tensors.

Bindings as in :mod:`trtllm_dflash.ops.cuda_attention`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.kernel_arguments import check_cache, dtype_code, index_pointer, require, stream_of
from trtllm_dflash.ops.plugin_library import load_library

_MAX_INJECT_LAYERS = 64


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
    require(kv.dim() == 5 and kv.shape[2] == 2, "kv", kv, "[N, layers, 2, kv_heads, head_dim]")
    rows, layers, _, kv_heads, head_dim = kv.shape
    require(kv[0:1, 0, 0].is_contiguous(), "kv", kv, "heads and head_dim contiguous")
    require(layers <= _MAX_INJECT_LAYERS, "kv", kv, f"at most {_MAX_INJECT_LAYERS} layers")
    require(positions.shape == slots.shape == (rows,), "slots", slots, f"[{rows}], as positions")
    require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", cos_sin, "contiguous float32")
    if len(k_caches) != layers or len(v_caches) != layers:
        raise EngineError(f"inject_kv: {len(k_caches)} and {len(v_caches)} caches for {layers} layers")
    params = _InjectParams(struct_size=ctypes.sizeof(_InjectParams))
    params.dtype, params.cache_dtype = dtype_code(kv, "kv"), dtype_code(k_caches[0], "k_caches")
    params.index_bytes = slots.element_size()
    params.rows, params.layers, params.num_kv_heads, params.head_dim = rows, layers, kv_heads, head_dim
    params.rotary_dim, params.eps = cos_sin.shape[1], eps
    params.kv = kv.data_ptr()
    params.token_stride, params.layer_stride, params.v_offset = kv.stride()[:3]
    if k_norm_weight is not None:
        require(
            k_norm_weight.dtype == kv.dtype and k_norm_weight.is_contiguous() and k_norm_weight.shape[-1] == head_dim,
            "k_norm_weight",
            k_norm_weight,
            f"[{layers}, {head_dim}] of {kv.dtype}",
        )
        params.k_norm_weight = k_norm_weight.data_ptr()
    params.cos_sin = cos_sin.data_ptr()
    params.positions, params.slots = index_pointer(positions, "positions", slots), slots.data_ptr()
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        for cache in (k_cache, v_cache):
            check_cache(cache, k_caches[0], kv_heads, head_dim)
        params.k_caches[layer], params.v_caches[layer] = k_cache.data_ptr(), v_cache.data_ptr()
        params.k_inverse_scale[layer] = 1.0 / k_scales[layer] if k_scales else 1.0
        params.v_inverse_scale[layer] = 1.0 / v_scales[layer] if v_scales else 1.0
    launch = load_library().function("dflash_inject_kv", (ctypes.POINTER(_InjectParams), ctypes.c_void_p))
    launch(ctypes.byref(params), stream_of(kv))


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
    require(qkv.dim() == 2 and qkv.shape[1] == width and qkv.stride(1) == 1, "qkv", qkv, f"[T, {width}]")
    require(positions.shape == slots.shape == (qkv.shape[0],), "slots", slots, f"[{qkv.shape[0]}], as positions")
    require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", cos_sin, "contiguous float32")
    for cache in (k_cache, v_cache):
        check_cache(cache, k_cache, kv_heads, head_dim)
    out = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    params = _QkRopeParams(struct_size=ctypes.sizeof(_QkRopeParams))
    params.dtype, params.cache_dtype = dtype_code(qkv, "qkv"), dtype_code(k_cache, "k_cache")
    params.index_bytes = slots.element_size()
    params.tokens, params.num_heads, params.num_kv_heads = qkv.shape[0], num_heads, kv_heads
    params.head_dim, params.rotary_dim, params.eps = head_dim, cos_sin.shape[1], eps
    params.qkv, params.qkv_stride = qkv.data_ptr(), qkv.stride(0)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            require(weight.dtype == qkv.dtype and weight.shape == (head_dim,), name, weight, f"[{head_dim}]")
            setattr(params, name, weight.data_ptr())
    params.cos_sin = cos_sin.data_ptr()
    params.positions, params.slots = index_pointer(positions, "positions", slots), slots.data_ptr()
    params.q_out, params.q_out_stride = out.data_ptr(), out.stride(0)
    params.k_cache, params.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    params.k_inverse_scale, params.v_inverse_scale = 1.0 / k_scale, 1.0 / v_scale
    params.settled = settled
    launch = load_library().function("dflash_qk_norm_rope_write", (ctypes.POINTER(_QkRopeParams), ctypes.c_void_p))
    launch(ctypes.byref(params), stream_of(qkv))
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
        require(
            kept.shape == residual.shape and kept.dtype == residual.dtype and kept.stride(1) == 1,
            "kept",
            kept,
            f"{list(residual.shape)} of {residual.dtype} with dense rows",
        )
    require(residual.is_contiguous(), "residual", residual, "contiguous")
    require(weight.shape == (width,), "weight", weight, f"[{width}]")
    if x is not None:
        require(
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
        dtype_code(weight, "weight"),
        dtype_code(residual, "residual"),
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        None if kept is None else kept.data_ptr(),
        0 if kept is None else kept.stride(0),
        rows,
        width,
        eps,
        stream_of(residual),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``[N, 2 I]`` (gate first, then up) → ``silu(gate) * up``, ``[N, I]``."""
    require(gate_up.dim() == 2 and gate_up.is_contiguous(), "gate_up", gate_up, "contiguous [N, 2 I]")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    launch = load_library().function(
        "dflash_swiglu",
        (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p),
    )
    launch(dtype_code(gate_up, "gate_up"), gate_up.data_ptr(), out.data_ptr(), rows, width, stream_of(gate_up))
    return out

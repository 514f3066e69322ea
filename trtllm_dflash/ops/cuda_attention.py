"""Attention of the plugin library on torch CUDA tensors.

Thin ctypes bindings of ``plugins/include/dflash_kernels.h``: they check what a kernel cannot check (devices, shapes,
contiguity), fill the parameter block and launch on the current stream. Nothing here synchronises; everything may run
under CUDA graph capture. Windows are given as in ``config.DrafterLayerAttention``: key k is seen when
``|q - k| <= window - 1``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.kernel_arguments import check_cache, dtype_code, index_pointer, require, stream_of
from trtllm_dflash.ops.plugin_library import load_library


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
    require(query_starts.shape == (page_table.shape[0] + 1,), "query_starts", query_starts, "[B + 1]")
    params.max_query = max_query
    params.query_starts = index_pointer(query_starts, "query_starts", page_table)
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
        require(
            tuple(rows.shape) == expected and rows.dtype == q.dtype and _rows_are_dense(rows),
            name,
            rows,
            f"{list(expected)} of {q.dtype}, heads and head_dim contiguous",
        )
    require(q.shape[0] == expected[0], "q", q, f"{expected[0]} rows")
    require(k_block.stride(0) == v_block.stride(0), "v_block", v_block, "the token stride of k_block")
    params.block_size = block_size
    params.k_block, params.v_block = k_block.data_ptr(), v_block.data_ptr()
    params.block_stride = k_block.stride(0)
    if block_lengths is not None:
        params.block_lengths = index_pointer(block_lengths, "block_lengths", page_table)
    return _attend(params, q, out, scale, window, causal, softcap, sinks, k_scale, v_scale, max_splits, context_settled)


def _attention_params(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, context_lengths: Tensor, out: Tensor | None
) -> _AttentionParams:
    require(q.dim() == 3 and _rows_are_dense(q), "q", q, "[T, heads, head_dim], heads and head_dim contiguous")
    for cache in (k_cache, v_cache):
        check_cache(cache, k_cache, k_cache.shape[2], q.shape[2])
    require(page_table.dim() == 2 and page_table.stride(1) == 1, "page_table", page_table, "[B, P]")
    require(context_lengths.shape == page_table.shape[:1], "context_lengths", context_lengths, "[B]")
    if out is not None:
        require(out.shape == q.shape and out.dtype == q.dtype and _rows_are_dense(out), "out", out, "like q")
    params = _AttentionParams(struct_size=ctypes.sizeof(_AttentionParams))
    params.dtype, params.kv_dtype = dtype_code(q, "q"), dtype_code(k_cache, "k_cache")
    params.index_bytes = page_table.element_size()
    params.batch, params.pages_per_request = page_table.shape
    params.num_heads, params.head_dim = q.shape[1:]
    params.page_tokens, params.num_kv_heads = k_cache.shape[1:3]
    params.q, params.q_stride = q.data_ptr(), q.stride(0)
    params.k_cache, params.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    params.page_table, params.page_table_stride = page_table.data_ptr(), page_table.stride(0)
    params.context_lengths = index_pointer(context_lengths, "context_lengths", page_table)
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
        require(sinks.shape == (q.shape[1],) and sinks.dtype == torch.float32, "sinks", sinks, "[heads] float32")
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
    launch(ctypes.byref(params), stream_of(q))
    return out


def _rows_are_dense(x: Tensor) -> bool:
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)

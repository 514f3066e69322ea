"""Grouped convolution, candidates, selector walk and acceptance on torch CUDA tensors.

Thin ctypes bindings of ``plugins/include/dflash_select.h``: they check what a kernel cannot check (devices, dtypes,
shapes, contiguity), fill the parameter block and launch on the current stream. Nothing here synchronises; everything
may run under CUDA graph capture. The torch definitions are ``ops/torch_select.py`` and ``runtime/acceptance.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import load_library

MAX_CANDIDATES = 32
MAX_VOCABULARY = 327672
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _GroupedConvParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "dtype rows block_size width groups taps"),
        ("eps", ctypes.c_float),
        *_fields(ctypes.c_void_p, "x dynamic base residual norm_weight out"),
        *_fields(ctypes.c_int64, "x_stride dynamic_stride"),
    )


class _CandidatesParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "dtype rows columns valid_columns count"),
        *_fields(ctypes.c_float, "multiplier softcap"),
        ("logits", ctypes.c_void_p),
        *_fields(ctypes.c_int64, "logits_stride id_offset"),
        *_fields(ctypes.c_void_p, "values ids workspace"),
        ("workspace_bytes", ctypes.c_int64),
    )


class _WalkParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "dtype batch positions count rank"),
        ("vocabulary", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "unary candidates hidden predecessor_codebook successor_codebook"),
        *_fields(ctypes.c_void_p, "anchors temperatures uniforms seeds first_positions tokens q_rows"),
    )


class _AcceptParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "dtype batch block_size count columns valid_columns"),
        ("logits", ctypes.c_void_p),
        *_fields(ctypes.c_int64, "logits_stride_batch logits_stride_row"),
        *_fields(ctypes.c_void_p, "draft_tokens candidates q_rows block_lengths temperatures top_k top_p min_p"),
        *_fields(ctypes.c_void_p, "seeds first_positions tokens accepted committed faulty workspace"),
        ("workspace_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class AcceptResult:
    """``tokens [B, S]`` int64 (committed, then -1), ``accepted [B]`` and ``committed [B]`` int64, ``faulty [B]`` bool
    (a logit of an existing row is not a number; the tokens of such a request mean nothing)."""

    tokens: Tensor
    accepted: Tensor
    committed: Tensor
    faulty: Tensor


def grouped_conv(x: Tensor, dynamic: Tensor, base: Tensor, block_size: int, *, out: Tensor | None = None) -> Tensor:
    """In form: ``out[t] = sum_i (base[i] + dynamic[t, i, group]) * x[t - i]`` inside each block, float32 inside.

    Args:
        x: ``[B*S, H]`` bfloat16, float16 or float32; H a multiple of 8; rows may be a slice of a wider matrix.
        dynamic: ``[B*S, taps * groups]`` tap-major, dtype of x; may be a column slice.
        base: ``[taps, H]`` contiguous, dtype of x.
        out: ``[B*S, H]`` to write into; must not overlap x.

    Raises:
        EngineError: tensors that do not fit each other, or a shape no kernel was compiled for.
    """
    params = _conv_params(x, dynamic, base, block_size)
    out = _result(out, x)
    params.out = out.data_ptr()
    _launch("dflash_grouped_conv", params, x)
    return out


def grouped_conv_add_rms_norm(
    x: Tensor,
    dynamic: Tensor,
    base: Tensor,
    block_size: int,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor | None:
    """Out form: ``residual += conv(x)`` in place, then ``rms_norm(residual) * norm_weight``.

    Args:
        x, dynamic, base, block_size, out: as :func:`grouped_conv`.
        residual: ``[B*S, H]`` float32 contiguous, updated in place.
        norm_weight: ``[H]`` dtype of x, or None: only the residual is updated and None is returned.
        eps: of the RMSNorm, whose sum of squares is float32.
    """
    params = _conv_params(x, dynamic, base, block_size)
    _require(residual.shape == x.shape and residual.dtype == torch.float32, "residual", residual, "[B*S, H] float32")
    params.residual = _pointer(residual, "residual", x)
    params.eps = eps
    if norm_weight is not None:
        _require(norm_weight.shape == x.shape[-1:] and norm_weight.dtype == x.dtype, "norm_weight", norm_weight, "[H]")
        params.norm_weight = _pointer(norm_weight, "norm_weight", x)
        out = _result(out, x)
        params.out = out.data_ptr()
    _launch("dflash_grouped_conv", params, x)
    return out


def candidates(
    logits: Tensor,
    count: int,
    *,
    valid_columns: int | None = None,
    id_offset: int = 0,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row, descending, ties to the lowest id.

    Args:
        logits: ``[R, V]`` bfloat16, float16 or float32, columns contiguous; V at most ``MAX_VOCABULARY``.
        count: K, at most ``MAX_CANDIDATES``.
        valid_columns: columns at or beyond it are padding and never chosen; default V.
        id_offset: id of column 0, for vocabulary shards.
        multiplier, softcap: applied to the logits in this order, in float32, before comparing.

    Returns:
        values ``[R, K]`` float32 (after multiplier and softcap) and ids ``[R, K]`` int64. NaN ranks as -infinity; a row
        with fewer than K valid columns ends in (-infinity, -1).
    """
    _require(logits.dim() == 2 and logits.dtype in _DTYPES, "logits", logits, "[R, V] bfloat16, float16 or float32")
    _require(logits.shape[1] == 0 or logits.stride(1) == 1, "logits", logits, "contiguous columns")
    rows, columns = logits.shape
    values = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    params = _CandidatesParams(
        struct_size=ctypes.sizeof(_CandidatesParams),
        dtype=_DTYPES[logits.dtype],
        rows=rows,
        columns=columns,
        valid_columns=columns if valid_columns is None else valid_columns,
        count=count,
        multiplier=multiplier,
        softcap=0.0 if softcap is None else softcap,
        logits=_cuda_pointer(logits, "logits"),
        logits_stride=logits.stride(0),
        id_offset=id_offset,
        values=values.data_ptr(),
        ids=ids.data_ptr(),
    )
    _launch("dflash_candidates", params, logits, workspace="dflash_candidates_workspace_bytes")
    return values, ids


def merge_candidates(shard_values: Tensor, shard_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the candidates of vocabulary shards: ``[shards, R, K]`` float32 and int64 → ``[R, K]`` each.

    Order and ties are those of :func:`candidates` over the whole vocabulary; id -1 is no candidate.
    """
    _require(shard_values.dim() == 3 and shard_values.dtype == torch.float32, "shard_values", shard_values, "[n, R, K]")
    _require(shard_ids.shape == shard_values.shape and shard_ids.dtype == torch.int64, "shard_ids", shard_ids, "int64")
    shards, rows, count = shard_values.shape
    values = torch.empty(rows, count, dtype=torch.float32, device=shard_values.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=shard_values.device)
    types = [ctypes.c_void_p] * 4 + [ctypes.c_int32] * 3 + [ctypes.c_void_p]
    with torch.cuda.device(shard_values.device):
        _function("dflash_merge_candidates", types)(
            _pointer(shard_values, "shard_values", shard_values),
            _pointer(shard_ids, "shard_ids", shard_values),
            values.data_ptr(),
            ids.data_ptr(),
            shards,
            rows,
            count,
            torch.cuda.current_stream().cuda_stream,
        )
    return values, ids


def selector_walk(
    unary: Tensor,
    candidate_ids: Tensor,
    hidden: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | None = None,
    *,
    seeds: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk the candidate lattice of the whole batch in one launch; arguments as ``Ops.selector_walk``.

    Args:
        uniforms: ``[B, S-1]`` float32 in [0, 1). Without them the kernel draws word 0 of the request's stream
            (``runtime/random_streams.py``) at ``first_positions[b] + j`` from ``seeds [B]``, both int64.

    Returns:
        tokens ``[B, S-1]`` int64 and q rows ``[B, S-1, K]`` float32.
    """
    batch, positions, count = candidate_ids.shape
    vocabulary, rank = predecessor_codebook.shape
    _require(hidden.dtype in _DTYPES, "hidden", hidden, "bfloat16, float16 or float32")
    expected: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("unary", unary, (batch, positions, count), torch.float32),
        ("candidate_ids", candidate_ids, (batch, positions, count), torch.int64),
        ("hidden", hidden, (batch, positions, rank), hidden.dtype),
        ("predecessor_codebook", predecessor_codebook, (vocabulary, rank), hidden.dtype),
        ("successor_codebook", successor_codebook, (vocabulary, rank), hidden.dtype),
        ("anchors", anchors, (batch,), torch.int64),
        ("temperatures", temperatures, (batch,), torch.float32),
    ]
    if uniforms is not None:
        expected.append(("uniforms", uniforms, (batch, positions), torch.float32))
    if seeds is not None and first_positions is not None:
        expected.append(("seeds", seeds, (batch,), torch.int64))
        expected.append(("first_positions", first_positions, (batch,), torch.int64))
    pointers = _checked_pointers(expected, hidden)
    tokens = torch.empty(batch, positions, dtype=torch.int64, device=hidden.device)
    q_rows = torch.empty(batch, positions, count, dtype=torch.float32, device=hidden.device)
    params = _WalkParams(
        struct_size=ctypes.sizeof(_WalkParams),
        dtype=_DTYPES[hidden.dtype],
        batch=batch,
        positions=positions,
        count=count,
        rank=rank,
        vocabulary=vocabulary,
        unary=pointers["unary"],
        candidates=pointers["candidate_ids"],
        hidden=pointers["hidden"],
        predecessor_codebook=pointers["predecessor_codebook"],
        successor_codebook=pointers["successor_codebook"],
        anchors=pointers["anchors"],
        temperatures=pointers["temperatures"],
        uniforms=pointers.get("uniforms"),
        seeds=pointers.get("seeds"),
        first_positions=pointers.get("first_positions"),
        tokens=tokens.data_ptr(),
        q_rows=q_rows.data_ptr(),
    )
    _launch("dflash_selector_walk", params, hidden)
    return tokens, q_rows


def uniforms(seeds: Tensor, first_positions: Tensor, count: int, word: int) -> Tensor:
    """One word of ``runtime/random_streams.py`` at ``first_positions[b] + j``, j < count: ``[B, count]`` float32.

    Args:
        seeds, first_positions: ``[B]`` int64. word: 0 walk, 1 accept, 2 residual.
    """
    batch = seeds.shape[0]
    expected = [(name, x, (batch,), torch.int64) for name, x in (("seeds", seeds), ("positions", first_positions))]
    pointers = _checked_pointers(expected, seeds)
    out = torch.empty(batch, count, dtype=torch.float32, device=seeds.device)
    types = [ctypes.c_void_p] * 3 + [ctypes.c_int32] * 3 + [ctypes.c_void_p]
    with torch.cuda.device(seeds.device):
        stream = torch.cuda.current_stream().cuda_stream
        _function("dflash_uniforms", types)(
            pointers["seeds"], pointers["positions"], out.data_ptr(), batch, count, word, stream
        )
    return out


def accept(
    logits: Tensor,
    draft_tokens: Tensor,
    candidate_ids: Tensor,
    q_rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    *,
    block_lengths: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    valid_columns: int | None = None,
) -> AcceptResult:
    """Verify S-1 drafts per request and draw the token that follows them (``runtime/acceptance.py``).

    Args:
        logits: ``[B, S, V]`` bfloat16, float16 or float32, already penalised; columns contiguous.
        draft_tokens: ``[B, S-1]`` int64. candidate_ids: ``[B, S-1, K]`` int64. q_rows: ``[B, S-1, K]`` float32.
        temperatures: ``[B]`` float32, 0 = greedy. seeds, first_positions: ``[B]`` int64; the absolute position of
            draft 0.
        block_lengths: ``[B]`` int64 rows that exist, 0 = idle request; default S.
        top_k: ``[B]`` int64, 0 = off. top_p, min_p: ``[B]`` float32. None is off for the whole batch.
        valid_columns: columns at or beyond it have no probability; default V.
    """
    _require(logits.dim() == 3 and logits.dtype in _DTYPES, "logits", logits, "[B, S, V] bfloat16, float16 or float32")
    _require(logits.stride(2) == 1, "logits", logits, "contiguous columns")
    batch, block_size, columns = logits.shape
    drafts, count = block_size - 1, candidate_ids.shape[-1]
    expected: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("draft_tokens", draft_tokens, (batch, drafts), torch.int64),
        ("candidate_ids", candidate_ids, (batch, drafts, count), torch.int64),
        ("q_rows", q_rows, (batch, drafts, count), torch.float32),
        ("temperatures", temperatures, (batch,), torch.float32),
        ("seeds", seeds, (batch,), torch.int64),
        ("first_positions", first_positions, (batch,), torch.int64),
    ]
    for name, tensor, dtype in (
        ("block_lengths", block_lengths, torch.int64),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        if tensor is not None:
            expected.append((name, tensor, (batch,), dtype))
    pointers = _checked_pointers(expected, logits)
    pointers["candidates"] = pointers.pop("candidate_ids")
    result = AcceptResult(
        tokens=torch.empty(batch, block_size, dtype=torch.int64, device=logits.device),
        accepted=torch.empty(batch, dtype=torch.int64, device=logits.device),
        committed=torch.empty(batch, dtype=torch.int64, device=logits.device),
        faulty=torch.empty(batch, dtype=torch.bool, device=logits.device),
    )
    params = _AcceptParams(
        struct_size=ctypes.sizeof(_AcceptParams),
        dtype=_DTYPES[logits.dtype],
        batch=batch,
        block_size=block_size,
        count=count,
        columns=columns,
        valid_columns=columns if valid_columns is None else valid_columns,
        logits=_cuda_pointer(logits, "logits"),
        logits_stride_batch=logits.stride(0),
        logits_stride_row=logits.stride(1),
        tokens=result.tokens.data_ptr(),
        accepted=result.accepted.data_ptr(),
        committed=result.committed.data_ptr(),
        faulty=result.faulty.data_ptr(),
        **pointers,
    )
    _launch("dflash_accept", params, logits, workspace="dflash_accept_workspace_bytes")
    return result


def _conv_params(x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> _GroupedConvParams:
    _require(x.dim() == 2 and x.dtype in _DTYPES and x.stride(1) == 1, "x", x, "[B*S, H] with contiguous columns")
    _require(base.dim() == 2 and base.shape[1] == x.shape[1] and base.dtype == x.dtype, "base", base, "[taps, H]")
    taps = base.shape[0]
    _require(
        dynamic.dim() == 2 and dynamic.shape[0] == x.shape[0] and dynamic.shape[1] % taps == 0,
        "dynamic",
        dynamic,
        f"[{x.shape[0]}, {taps} * groups]",
    )
    _require(dynamic.dtype == x.dtype and dynamic.stride(1) == 1, "dynamic", dynamic, "dtype of x, contiguous columns")
    return _GroupedConvParams(
        struct_size=ctypes.sizeof(_GroupedConvParams),
        dtype=_DTYPES[x.dtype],
        rows=x.shape[0],
        block_size=block_size,
        width=x.shape[1],
        groups=dynamic.shape[1] // taps,
        taps=taps,
        x=_cuda_pointer(x, "x"),
        dynamic=_cuda_pointer(dynamic, "dynamic", x),
        base=_pointer(base, "base", x),
        x_stride=x.stride(0),
        dynamic_stride=dynamic.stride(0),
    )


def _require(condition: bool, name: str, tensor: Tensor, expected: str) -> None:
    if not condition:
        raise EngineError(f"{name}: got {tuple(tensor.shape)} {tensor.dtype}, expected {expected}")


def _cuda_pointer(tensor: Tensor, name: str, beside: Tensor | None = None) -> int:
    device = tensor.device if beside is None else beside.device
    if not tensor.is_cuda or tensor.device != device:
        raise EngineError(
            f"{name}: is on {tensor.device}, expected {device if device.type == 'cuda' else 'a CUDA device'}"
        )
    return tensor.data_ptr()


def _pointer(tensor: Tensor, name: str, beside: Tensor) -> int:
    _require(tensor.is_contiguous(), name, tensor, "a contiguous tensor")
    return _cuda_pointer(tensor, name, beside)


def _checked_pointers(
    expected: Sequence[tuple[str, Tensor, tuple[int, ...], torch.dtype]], beside: Tensor
) -> dict[str, int]:
    pointers = {}
    for name, tensor, shape, dtype in expected:
        _require(tensor.shape == shape and tensor.dtype == dtype, name, tensor, f"{shape} {dtype}")
        pointers[name] = _pointer(tensor, name, beside)
    return pointers


def _result(out: Tensor | None, x: Tensor) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _require(out.shape == x.shape and out.dtype == x.dtype, "out", out, f"{tuple(x.shape)} {x.dtype}")
    _pointer(out, "out", x)
    return out


def _function(name: str, argument_types: Sequence[Any]) -> Callable[..., None]:
    return load_library().function(name, argument_types)


def _launch(name: str, params: ctypes.Structure, beside: Tensor, *, workspace: str | None = None) -> None:
    with torch.cuda.device(beside.device):
        scratch = None
        if workspace is not None:
            library = load_library()
            measure = getattr(library.handle, workspace)
            measure.argtypes, measure.restype = [ctypes.c_void_p], ctypes.c_int64
            size = measure(ctypes.byref(params))
            if size < 0:
                raise EngineError(f"{name}: {library.last_error()}")
            # The caching allocator hands this memory out again only to work queued later on this stream.
            scratch = torch.empty(size, dtype=torch.uint8, device=beside.device)
            params.workspace, params.workspace_bytes = scratch.data_ptr(), size
        stream = torch.cuda.current_stream().cuda_stream
        _function(name, [ctypes.c_void_p, ctypes.c_void_p])(ctypes.byref(params), stream)

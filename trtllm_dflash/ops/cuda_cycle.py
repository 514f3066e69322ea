"""A cycle's bookkeeping on torch CUDA tensors: one launch where the torch definition takes a dozen.

Thin ctypes bindings of ``plugins/include/dflash_cycle.h``; the definitions are ``runtime/slots.py`` and
``runtime/cycle.py``. Nothing synchronises; everything may run under CUDA graph capture.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import load_library

STATE_INTS, STATE_FLOATS, MAX_STOP_IDS, MAX_BLOCK = 7, 6, 64, 64


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _GatherParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "batch state_rows pages block_size"),
        *_fields(ctypes.c_void_p, "slots ints floats page_table"),
        ("page_stride", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "stop_ids out_ints out_floats out_pages out_stop_ids block_lengths"),
    )


class _CutParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "batch block_size"),
        *_fields(ctypes.c_void_p, "tokens accepted faulty remaining stop_ids produced status packed"),
    )


class _PublishParams(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "batch block_size state_rows"),
        *_fields(ctypes.c_void_p, "slots rows tokens produced status ints"),
    )


@dataclass(frozen=True)
class GatheredState:
    """Columns of the state matrices for B slots: ``ints [7, B]``, ``floats [6, B]``, ``pages [B, P]``,
    ``stop_ids [B, 64]``, ``block_lengths [B]``."""

    ints: Tensor
    floats: Tensor
    pages: Tensor
    stop_ids: Tensor
    block_lengths: Tensor


def gather_state(
    slots: Tensor, ints: Tensor, floats: Tensor, page_table: Tensor, stop_ids: Tensor, block_size: int
) -> GatheredState:
    """The state of ``slots [B]`` out of ``ints [7, R]``, ``floats [6, R]``, ``page_table [R, P]`` and stop ids.

    Raises:
        EngineError: tensors that do not fit each other.
    """
    batch, rows = slots.shape[0], ints.shape[1]
    _require(ints.shape == (STATE_INTS, rows) and ints.is_contiguous(), "ints", ints)
    _require(floats.shape == (STATE_FLOATS, rows) and floats.is_contiguous(), "floats", floats)
    _require(stop_ids.shape == (rows, MAX_STOP_IDS) and stop_ids.is_contiguous(), "stop_ids", stop_ids)
    _require(page_table.dim() == 2 and page_table.stride(1) == 1, "page_table", page_table)
    pages = page_table.shape[1]
    out = GatheredState(
        ints.new_empty(STATE_INTS, batch),
        floats.new_empty(STATE_FLOATS, batch),
        page_table.new_empty(batch, pages),
        stop_ids.new_empty(batch, MAX_STOP_IDS),
        ints.new_empty(batch),
    )
    params = _GatherParams(
        struct_size=ctypes.sizeof(_GatherParams),
        batch=batch,
        state_rows=rows,
        pages=pages,
        block_size=block_size,
        slots=slots.data_ptr(),
        ints=ints.data_ptr(),
        floats=floats.data_ptr(),
        page_table=page_table.data_ptr(),
        page_stride=page_table.stride(0),
        stop_ids=stop_ids.data_ptr(),
        out_ints=out.ints.data_ptr(),
        out_floats=out.floats.data_ptr(),
        out_pages=out.pages.data_ptr(),
        out_stop_ids=out.stop_ids.data_ptr(),
        block_lengths=out.block_lengths.data_ptr(),
    )
    _launch("dflash_cycle_gather", params, slots)
    return out


def block_rows(
    page_table: Tensor, context_lengths: Tensor, lengths: Tensor, block_size: int, page_tokens: int
) -> tuple[Tensor, Tensor]:
    """Positions ``[B * S]`` of each request's block and their cache rows (-1 from row ``lengths[b]`` on)."""
    batch, pages = page_table.shape
    positions, slots = (page_table.new_empty(batch * block_size) for _ in range(2))
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    types = [pointer, long, integer, pointer, pointer, integer, integer, integer, pointer, pointer, pointer]
    _require(page_table.stride(1) == 1 and page_table.dtype == torch.int64, "page_table", page_table)
    for name, tensor in (("context_lengths", context_lengths), ("lengths", lengths)):
        _require(tensor.shape == (batch,) and tensor.is_contiguous() and tensor.dtype == torch.int64, name, tensor)
    with torch.cuda.device(page_table.device):
        load_library().function("dflash_block_rows", types)(
            page_table.data_ptr(),
            page_table.stride(0),
            pages,
            context_lengths.data_ptr(),
            lengths.data_ptr(),
            batch,
            block_size,
            page_tokens,
            positions.data_ptr(),
            slots.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
    return positions, slots


def cut(
    tokens: Tensor, accepted: Tensor, faulty: Tensor, remaining: Tensor, stop_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``produced [B]``, ``status [B]`` and ``packed [B, S + 3]`` (tokens, produced, accepted, status) of one cycle."""
    batch, block_size = tokens.shape
    _require(tokens.is_contiguous() and tokens.dtype == torch.int64, "tokens", tokens)
    _require(stop_ids.shape == (batch, MAX_STOP_IDS) and stop_ids.is_contiguous(), "stop_ids", stop_ids)
    for name, tensor in (("accepted", accepted), ("remaining", remaining), ("faulty", faulty)):
        _require(tensor.shape == (batch,) and tensor.is_contiguous(), name, tensor)
    produced, status = (tokens.new_empty(batch) for _ in range(2))
    packed = tokens.new_empty(batch, block_size + 3)
    params = _CutParams(
        struct_size=ctypes.sizeof(_CutParams),
        batch=batch,
        block_size=block_size,
        tokens=tokens.data_ptr(),
        accepted=accepted.data_ptr(),
        faulty=faulty.data_ptr(),
        remaining=remaining.data_ptr(),
        stop_ids=stop_ids.data_ptr(),
        produced=produced.data_ptr(),
        status=status.data_ptr(),
        packed=packed.data_ptr(),
    )
    _launch("dflash_cycle_cut", params, tokens)
    return produced, status, packed


def publish_state(ints: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor, produced: Tensor, status: Tensor) -> None:
    """Move ``slots [B]`` of ``ints [7, R]`` forward; ``rows [7, B]`` is what they held when the cycle began."""
    batch, block_size = tokens.shape
    _require(rows.shape == (STATE_INTS, batch) and rows.is_contiguous(), "rows", rows)
    params = _PublishParams(
        struct_size=ctypes.sizeof(_PublishParams),
        batch=batch,
        block_size=block_size,
        state_rows=ints.shape[1],
        slots=slots.data_ptr(),
        rows=rows.data_ptr(),
        tokens=tokens.data_ptr(),
        produced=produced.data_ptr(),
        status=status.data_ptr(),
        ints=ints.data_ptr(),
    )
    _launch("dflash_cycle_publish", params, tokens)


def _require(holds: bool, name: str, found: Tensor) -> None:
    if not holds:
        raise EngineError(f"{name}: {found.dtype} {list(found.shape)} does not fit the cycle's other tensors")


def _launch(name: str, params: ctypes.Structure, beside: Tensor) -> None:
    if not beside.is_cuda:
        raise EngineError(f"{name}: needs CUDA tensors, got one on {beside.device}")
    with torch.cuda.device(beside.device):
        stream = torch.cuda.current_stream().cuda_stream
        load_library().function(name, [ctypes.c_void_p, ctypes.c_void_p])(ctypes.byref(params), stream)

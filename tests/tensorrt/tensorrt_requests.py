"""Requests to emit networks from a checkpoint, as ``build`` would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest, linear_row_tokens
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

RequestFactory = Callable[..., NetworkRequest]


def native_limits(block_size: int, *, batch: int = 3, seq_len: int = 200, num_tokens: int = 64) -> BuildLimits:
    """Limits as ``build`` sets them for linear caches."""
    limits = BuildLimits(batch, seq_len, num_tokens, block_size, 1)
    return replace(limits, page_tokens=linear_row_tokens(limits) - block_size)


def paged_limits(block_size: int, *, batch: int = 3, seq_len: int = 200, num_tokens: int = 64) -> BuildLimits:
    """Limits as ``build`` sets them for paged caches, with small pages."""
    return BuildLimits(batch, seq_len, num_tokens, block_size, 16)


def request_of(rtx: TensorRTLibrary, checkpoint: Path, **changes: object) -> NetworkRequest:
    """A native request for rank 0 of a checkpoint."""
    source = open_checkpoint(checkpoint)
    block_size = 1 if source.drafter_config is None else source.drafter_config.block_size
    request = NetworkRequest(
        library=rtx,
        lowering="native",
        weights="external",
        target_config=source.target_config,
        drafter_config=source.drafter_config,
        limits=native_limits(block_size),
        dtype=getattr(torch, source.target_config.dtype),
        target=source.tensors("target"),
        drafter=None if source.drafter_config is None else source.tensors("drafter"),
        ranks=source.mapping.tp_size,
    )
    return replace(request, **changes)  # type: ignore[arg-type]

"""Checks of tensors that become arguments of the plugin library's kernels, which cannot check them themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}


def dtype_code(x: Tensor, name: str) -> int:
    """The ``dflash_dtype`` of x; raises EngineError for a dtype without one."""
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise EngineError(f"{name}: has dtype {x.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    return code


def index_pointer(indices: Tensor, name: str, like: Tensor) -> int:
    """Address of contiguous int32 or int64 indices that have the dtype of ``like``; else EngineError."""
    require(
        indices.dtype == like.dtype and indices.dtype in (torch.int32, torch.int64) and indices.is_contiguous(),
        name,
        indices,
        f"contiguous int32 or int64, {like.dtype} like its companions",
    )
    return indices.data_ptr()


def stream_of(x: Tensor) -> int:
    """The current CUDA stream of x's device; EngineError for another kind of device."""
    if x.device.type != "cuda":
        raise EngineError(f"the CUDA kernels need CUDA tensors, got one on {x.device}")
    return torch.cuda.current_stream(x.device).cuda_stream


def require(holds: bool, name: str, found: Tensor, expected: str) -> None:
    """Raise EngineError about tensor ``name`` unless ``holds``."""
    if not holds:
        raise EngineError(
            f"{name}: is {found.dtype} {list(found.shape)} with strides {list(found.stride())}, expected {expected}"
        )


def check_cache(cache: Tensor, like: Tensor, kv_heads: int, head_dim: int) -> None:
    """Raise EngineError unless the cache has shape and dtype of ``like``, and these heads."""
    require(
        cache.dim() == 4 and cache.is_contiguous() and cache.dtype == like.dtype and cache.shape == like.shape,
        "cache",
        cache,
        f"contiguous {list(like.shape)} of {like.dtype}",
    )
    require(tuple(cache.shape[2:]) == (kv_heads, head_dim), "cache", cache, f"[…, …, {kv_heads}, {head_dim}]")

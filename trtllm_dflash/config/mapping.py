"""Parallel mapping and quantisation: facts shared by convert and build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QuantAlgo = Literal["none", "fp8", "nvfp4", "int8"]
KvCacheDtype = Literal["auto", "fp8"]


@dataclass(frozen=True)
class ParallelMapping:
    """Tensor-parallel mapping; ``world_size`` equals ``tp_size``."""

    tp_size: int = 1


@dataclass(frozen=True)
class QuantizationConfig:
    """Weight quantisation of linear layers and dtype of the KV cache.

    ``fp8``: e4m3, one float32 scale per output channel. ``int8``: symmetric, one scale per output channel.
    ``nvfp4``: e2m1 in blocks of 16 along the input axis, e4m3 block scales, one float32 global scale.
    Embedding, head, norms, convolution and selector stay unquantised.
    """

    algo: QuantAlgo = "none"
    kv_cache_dtype: KvCacheDtype = "auto"

"""Rotary tables: cosines and sines of every position, made once per engine.

Formulas: transformers ``modeling_rope_utils`` (default, linear, llama3, yarn).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.errors import ConfigError


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies ``[rotary_dim / 2]`` float32 and the factor on cosines and sines."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return plain, 1.0
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope)
    raise ConfigError(f"rope type {rope.rope_type!r}: expected default, linear, llama3 or yarn")


def cos_sin_table(rope: RopeConfig, positions: int) -> Tensor:
    """``[positions, rotary_dim]`` float32: the cosine half, then the sine half."""
    inv_freq, factor = inverse_frequencies(rope)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    if low is None or high is None or original is None:
        raise ConfigError("llama3 rope needs low_freq_factor, high_freq_factor and original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    slow = torch.where(wavelength > original / low, plain / rope.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slow / rope.factor + smooth * slow
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, slow)


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    original = rope.original_max_positions
    if original is None:
        raise ConfigError("yarn rope needs original_max_position_embeddings")

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
        else:
            attention_factor = magnitude(rope.factor)

    def correction_dim(rotations: float) -> float:
        return (rope.rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast or 32.0), correction_dim(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    frequencies = rope.theta ** (torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim)
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * frequencies)) * (1 - keep) + (1.0 / frequencies) * keep, attention_factor

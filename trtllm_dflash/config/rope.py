"""Rotary position embedding parameters, as facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotary embedding.

    Fields beyond ``theta`` and ``rotary_dim`` matter only for the rope types that name them in transformers'
    ``modeling_rope_utils`` (the source of the formulas).

    Attributes:
        theta: base of the geometric frequency series.
        rotary_dim: number of leading head dimensions that rotate (equals head_dim unless partial).
        rope_type: frequency rule.
        factor: context extension factor (linear, llama3, yarn).
        original_max_positions: context length before extension (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: yarn.
    """

    theta: float
    rotary_dim: int
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

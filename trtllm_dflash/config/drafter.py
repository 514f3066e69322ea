"""The drafter's configuration: facts only, parsed at the edge by ``config.drafter_formats``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtllm_dflash.config.rope import RopeConfig


@dataclass(frozen=True)
class DrafterLayerAttention:
    """Visibility of one drafter layer.

    A query at position q sees key position k when ``|q - k| <= window - 1`` (only ``q - k`` if causal, and then
    k <= q too); ``window`` None means every position.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class ConvConfig:
    """Grouped dynamic convolution of DFlash 2: taps and channels per group."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """Candidate selector of DFlash 2: rank of the bilinear score and candidates K per position."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash (version 1) or DFlash 2 (version 2) drafter.

    Attributes:
        version: 1 or 2; ``conv`` and ``selector`` are set exactly when it is 2.
        source_format: ``z-lab`` or ``speculators``.
        dtype: dtype name of the checkpoint's tensors.
        vocab_size: the target's vocabulary as the drafter knows it.
        draft_vocab_size: rows of the drafter's own reduced head (Speculators, version 1), or None when it uses
            the target's head.
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps: geometry.
        target_hidden_size: H of one captured feature column.
        rope: the drafter's own rotary parameters (never the target's).
        max_position_embeddings: longest trained position + 1.
        qk_norm: RMSNorm over each query and key head before RoPE.
        attention_bias: q, k, v and o projections have a bias.
        layers: visibility of each layer.
        block_size: S, the anchor included.
        mask_token_id: id whose embedding fills rows 1..S-1 of the block.
        target_layer_ids: captured target layers in feature order; id i is the output of decoder layer i.
        num_target_layers: layers of the target it was trained for, or None where the format has no such field.
        output_multiplier: factor on the head's logits before ``final_logit_softcapping`` (tanh), for the drafter.
        input_embedding_scale: factor on the block's embeddings.
    """

    version: Literal[1, 2]
    source_format: Literal["z-lab", "speculators"]
    dtype: str
    vocab_size: int
    draft_vocab_size: int | None
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    target_hidden_size: int
    rope: RopeConfig
    max_position_embeddings: int
    qk_norm: bool
    attention_bias: bool
    layers: tuple[DrafterLayerAttention, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    conv: ConvConfig | None
    selector: SelectorConfig | None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0

"""The target decoder's configuration: facts only, parsed at the edge by ``config.families``."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dflash.config.rope import RopeConfig


@dataclass(frozen=True)
class TargetConfig:
    """A dense decoder-only target.

    Attributes:
        family: key of the family registry (``llama``, ``qwen3``).
        architecture: Hugging Face architecture name, for example ``LlamaForCausalLM``.
        dtype: compute dtype name: ``float32``, ``float16`` or ``bfloat16``.
        vocab_size: rows of the embedding table and of the head (padding rows excluded).
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: geometry.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: rotary embedding parameters.
        max_position_embeddings: longest trained position + 1.
        tie_word_embeddings: the head is the embedding table.
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        attention_bias: q, k and v projections have a bias; ``attention_output_bias``: o has one.
        mlp_bias: the MLP's projections have a bias.
        sliding_windows: per layer, number of visible positions including the query itself, or None for full.
        bos_token_id, eos_token_ids, pad_token_id: special tokens; ``eos_token_ids`` end generation.
    """

    family: str
    architecture: str
    dtype: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

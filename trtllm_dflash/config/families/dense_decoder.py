"""The part of a config.json that dense Llama-shaped decoders have in common."""

from __future__ import annotations

from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.rope_parsing import parse_rope
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import ConfigError

_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "thinker_config")


def refuse_unsupported(config: JsonObject) -> None:
    """Refuse by name what no dense text decoder here computes: experts, other modalities, stored quantisation.

    Raises:
        ConfigError: naming the key that tells.
    """
    for key in _MOE_KEYS:
        if config.has(key) and config.data[key] not in (0, 1):
            raise config.error(key, "no experts (mixture-of-experts targets are not supported)")
    for key in _MULTIMODAL_KEYS:
        if config.has(key):
            raise config.error(key, "a text-only decoder (multimodal targets are not supported)")
    if config.has("quantization_config"):
        raise config.error(
            "quantization_config",
            "unquantised weights",
            hint="convert the original checkpoint and pass --quantization fp8, int8 or nvfp4",
        )
    activation = config.string("hidden_act", default="silu")
    if activation != "silu":
        raise config.error("hidden_act", '"silu"')


def parse_dense_decoder(
    config: JsonObject,
    *,
    family: str,
    architecture: str,
    dtype: str,
    head_dim_default: int | None,
    qk_norm: bool,
    rms_norm_eps_default: float,
    mlp_bias: bool,
    sliding_windows: tuple[int | None, ...],
) -> TargetConfig:
    """Geometry, rotary embedding and special tokens of a Llama-shaped decoder.

    Args:
        config: root of config.json. family, architecture: as in ``TargetConfig``.
        dtype: compute dtype name.
        head_dim_default: head size where the file has none; None means hidden_size / num_attention_heads.
        qk_norm, mlp_bias, sliding_windows: as in ``TargetConfig``.
        rms_norm_eps_default: the family's default in transformers.

    Raises:
        ConfigError: a key is missing, of the wrong type or out of range.
    """
    refuse_unsupported(config)
    hidden_size = config.integer("hidden_size", minimum=1)
    num_heads = config.integer("num_attention_heads", minimum=1)
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads, minimum=1)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if not config.has("head_dim") and head_dim_default is None and hidden_size % num_heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or a head_dim")
    head_dim = config.integer("head_dim", default=head_dim_default or hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise config.error("head_dim", "an even number (rotary embeddings rotate pairs)")
    max_positions = config.integer("max_position_embeddings", minimum=1)
    attention_bias = config.boolean("attention_bias", default=False)
    vocab_size = config.integer("vocab_size", minimum=1)
    return TargetConfig(
        family=family,
        architecture=architecture,
        dtype=dtype,
        vocab_size=vocab_size,
        num_layers=config.integer("num_hidden_layers", minimum=1),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", minimum=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", default=rms_norm_eps_default, above=0),
        rope=parse_rope(config, head_dim=head_dim, max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=mlp_bias,
        sliding_windows=sliding_windows,
        bos_token_id=config.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(config, vocab_size),
        pad_token_id=config.optional_integer("pad_token_id"),
    )


def _eos_token_ids(config: JsonObject, vocab_size: int) -> tuple[int, ...]:
    """Ids that end generation; a generation_config.json beside the file decides if it names any, as in transformers."""
    generation_file = config.file.with_name("generation_config.json")
    sources = [read_json(generation_file)] if generation_file.is_file() else []
    for source in [*sources, config]:
        if not source.has("eos_token_id"):
            continue
        single = isinstance(source.data["eos_token_id"], int)
        ids = (source.integer("eos_token_id"),) if single else source.integers("eos_token_id")
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"{source.file}: key 'eos_token_id': found {token_id}, expected ids in [0, {vocab_size - 1}]"
                )
        return tuple(dict.fromkeys(ids))
    return ()

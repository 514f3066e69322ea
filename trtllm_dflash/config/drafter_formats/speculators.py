"""Drafters in the Speculators format (``speculators_model_type`` ``dflash`` or ``dflash2``).

Its layer ids count the embedding output as 0, so an id here is one less; a reduced vocabulary brings a head of its
own and ``d2t`` offsets.
"""

from __future__ import annotations

from typing import Literal

from trtllm_dflash.config.drafter import DrafterConfig, DrafterLayerAttention
from trtllm_dflash.config.drafter_formats import recipe
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.layer_windows import layer_windows

MODEL_TYPES: dict[str, Literal[1, 2]] = {"dflash": 1, "dflash2": 2}
DEFAULT_BLOCK_SIZE = 8


def parse(config: JsonObject, dtype: str) -> DrafterConfig:
    """Parse the root of a Speculators config.json.

    Args:
        config: the root object. dtype: dtype name of the tensors.

    Raises:
        ConfigError: missing, contradictory or unsupported values, by file and key.
    """
    version = MODEL_TYPES[config.string("speculators_model_type")]
    layers = config.child("transformer_layer_config")
    recipe.refuse_variants(config, layers)
    model_type = layers.string("model_type", default="qwen3", choices=("qwen3", "llama"))
    # Llama's configuration has no head_dim of its own; the layers are Qwen3's either way.
    geometry = recipe.parse_geometry(layers, head_dim_default=128 if model_type == "qwen3" else None)
    conv = selector = None
    if version == 2:
        conv, selector = recipe.parse_dflash2_recipe(
            config, hidden_size=geometry.hidden_size, vocab_size=geometry.vocab_size
        )
    draft_vocab_size = _draft_vocab_size(config, version, geometry.vocab_size)
    block_size = config.integer("block_size", default=DEFAULT_BLOCK_SIZE, minimum=2, maximum=recipe.MAX_BLOCK_SIZE)
    _check_speculative_tokens(config, block_size)
    non_causal = config.boolean("sliding_window_non_causal", default=version == 2)
    softcap = config.number("final_logit_softcapping", default=0.0)
    ids = config.integers("aux_hidden_state_layer_ids")
    recipe.check_layer_ids(config, "aux_hidden_state_layer_ids", ids, first=1, num_target_layers=None)
    return DrafterConfig(
        version=version,
        source_format="speculators",
        dtype=dtype,
        vocab_size=geometry.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        rms_norm_eps=geometry.rms_norm_eps,
        target_hidden_size=config.integer("target_hidden_size", default=geometry.hidden_size, minimum=1),
        rope=geometry.rope,
        max_position_embeddings=geometry.max_position_embeddings,
        qk_norm=True,
        attention_bias=geometry.attention_bias,
        layers=tuple(
            DrafterLayerAttention(window=layer.window, causal=layer.sliding and not non_causal)
            for layer in layer_windows(layers, num_layers=geometry.num_layers, infer_flag=True)
        ),
        block_size=block_size,
        mask_token_id=config.integer("mask_token_id", minimum=0, maximum=geometry.vocab_size - 1),
        target_layer_ids=tuple(i - 1 for i in ids),
        num_target_layers=None,
        conv=conv,
        selector=selector,
        output_multiplier=config.number("output_multiplier", default=1.0),
        final_logit_softcapping=softcap if softcap > 0 else None,
        input_embedding_scale=config.number("input_embedding_scale", default=1.0),
    )


def _draft_vocab_size(config: JsonObject, version: int, vocab_size: int) -> int | None:
    if version == 2 and not config.has("draft_vocab_size"):
        return None
    draft_vocab_size = config.integer("draft_vocab_size", minimum=1, maximum=vocab_size)
    if draft_vocab_size == vocab_size:
        return None
    if version == 2:
        raise config.error(
            "draft_vocab_size", f"the whole vocabulary ({vocab_size}): DFlash 2 cannot have a reduced one"
        )
    return draft_vocab_size


def _check_speculative_tokens(config: JsonObject, block_size: int) -> None:
    speculators_config = config.optional_child("speculators_config")
    methods = speculators_config.data.get("proposal_methods") if speculators_config is not None else None
    for method in methods if isinstance(methods, list) else []:
        tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(tokens, int) and tokens > block_size - 1:
            raise config.error("block_size", f"at least {tokens + 1}, because speculative_tokens is {tokens}")

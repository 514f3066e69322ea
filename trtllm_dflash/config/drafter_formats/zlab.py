"""Drafters in z-lab's format: a Qwen3 config.json with the recipe in ``dflash_config`` or at top level.

Meaning of every field: ``dflash`` 0.1.0 (``DFlashDraftModel``, ``DFlash2DraftModel``).
"""

from __future__ import annotations

import logging
from typing import Literal

from trtllm_dflash.config.drafter import DrafterConfig, DrafterLayerAttention
from trtllm_dflash.config.drafter_formats import recipe
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.layer_windows import SLIDING, LayerWindow, layer_types, layer_windows
from trtllm_dflash.errors import ConfigError

ARCHITECTURES: dict[str, Literal[1, 2]] = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}
DEFAULT_BLOCK_SIZE = 16

_RECIPE_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "is_causal",
    "use_swa",
    "swa_window_size",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    "sample_from_anchor",
    *recipe.DFLASH2_KEYS,
)

log = logging.getLogger(__name__)


def parse(config: JsonObject, dtype: str) -> DrafterConfig:
    """Parse the root of a z-lab config.json.

    Args:
        config: the root object. dtype: dtype name of the tensors.

    Raises:
        ConfigError: missing, contradictory or unsupported values, by file and key.
    """
    architecture = config.strings("architectures")[0]
    version = ARCHITECTURES[architecture]
    fields = _recipe_fields(config)
    recipe.refuse_variants(config, fields)
    geometry = recipe.parse_geometry(config)
    conv = selector = None
    if version == 2:
        conv, selector = recipe.parse_dflash2_recipe(
            fields, hidden_size=geometry.hidden_size, vocab_size=geometry.vocab_size
        )
    else:
        for key in recipe.DFLASH2_KEYS:
            if fields.has(key):
                raise fields.error(key, f"nothing: architecture {architecture} is DFlash 1, this is a DFlash 2 field")
    if config.has("draft_vocab_size") and config.integer("draft_vocab_size") != geometry.vocab_size:
        raise config.error(
            "draft_vocab_size", f"vocab_size ({geometry.vocab_size}): z-lab drafters use the target's whole head"
        )
    softcap = fields.number("final_logit_softcapping", default=0.0)
    num_target_layers = fields.optional_integer("num_target_layers", minimum=1)
    return DrafterConfig(
        version=version,
        source_format="z-lab",
        dtype=dtype,
        vocab_size=geometry.vocab_size,
        draft_vocab_size=None,
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        rms_norm_eps=geometry.rms_norm_eps,
        target_hidden_size=geometry.hidden_size,
        rope=geometry.rope,
        max_position_embeddings=geometry.max_position_embeddings,
        qk_norm=True,
        attention_bias=geometry.attention_bias,
        layers=_layer_attention(config, fields, geometry.num_layers),
        block_size=_block_size(fields),
        mask_token_id=fields.integer("mask_token_id", minimum=0, maximum=geometry.vocab_size - 1),
        target_layer_ids=_target_layer_ids(fields, num_target_layers, geometry.num_layers),
        num_target_layers=num_target_layers,
        conv=conv,
        selector=selector,
        output_multiplier=fields.number("output_multiplier", default=1.0),
        # The reference ignores a cap that is not positive.
        final_logit_softcapping=softcap if softcap > 0 else None,
        input_embedding_scale=fields.number("input_embedding_scale", default=1.0),
    )


def _recipe_fields(config: JsonObject) -> JsonObject:
    """The recipe with ``dflash_config`` laid over the top level; a field given twice must have one value."""
    nested = config.optional_child("dflash_config")
    if nested is None:
        return config
    merged = {key: config.data[key] for key in (*_RECIPE_KEYS, "causal") if key in config.data}
    for key, value in nested.data.items():
        outer = merged.get(key)
        if value is not None and outer is not None and outer != value:
            raise nested.error(key, f"the same value as at top level ({outer})", hint="keep one of the two")
        if value is not None:
            merged[key] = value
    return JsonObject(merged, config.file, "dflash_config")


def _block_size(fields: JsonObject) -> int:
    if not fields.has("block_size"):
        log.warning("%s: no block_size; using %d, the reference's default", fields.file, DEFAULT_BLOCK_SIZE)
    return fields.integer("block_size", default=DEFAULT_BLOCK_SIZE, minimum=2, maximum=recipe.MAX_BLOCK_SIZE)


def _target_layer_ids(fields: JsonObject, num_target_layers: int | None, num_layers: int) -> tuple[int, ...]:
    if not fields.has("target_layer_ids"):
        if num_target_layers is None:
            raise fields.error("target_layer_ids", "a list of layer ids (or num_target_layers, to derive them)")
        ids = evenly_spaced_layer_ids(num_target_layers, num_layers)
    else:
        ids = fields.integers("target_layer_ids")
    recipe.check_layer_ids(fields, "target_layer_ids", ids, first=0, num_target_layers=num_target_layers)
    return ids


def evenly_spaced_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The reference's default ids: one per drafter layer, evenly from target layer 1 to the third last.

    Source: ``dflash`` 0.1.0 ``build_target_layer_ids`` (Python's rounding, halves to even).
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def _layer_attention(config: JsonObject, fields: JsonObject, num_layers: int) -> tuple[DrafterLayerAttention, ...]:
    """Visibility per layer. Without ``is_causal`` sliding layers are causal and full layers are not."""
    causal = _causal(fields)
    if fields.optional_boolean("use_swa") is None and not fields.has("swa_window_size"):
        layers = layer_windows(config, num_layers=num_layers, infer_flag=True)
        causal_default = True
    else:
        layers, causal_default = _swa_windows(config, fields, num_layers)
    return tuple(
        DrafterLayerAttention(layer.window, (layer.sliding and causal_default) if causal is None else causal)
        for layer in layers
    )


def _causal(fields: JsonObject) -> bool | None:
    is_causal, causal = fields.optional_boolean("is_causal"), fields.optional_boolean("causal")
    if is_causal is not None and causal is not None and is_causal != causal:
        raise fields.error("causal", f"the same value as is_causal ({is_causal})")
    return is_causal if is_causal is not None else causal


def _swa_windows(config: JsonObject, fields: JsonObject, num_layers: int) -> tuple[tuple[LayerWindow, ...], bool]:
    """The other spelling of windows, ``use_swa`` and ``swa_window_size``, as MiMo and ModelOpt write it.

    ``use_swa`` with no sliding layer in ``layer_types`` means a window on every layer, not causal by default
    (vLLM ``qwen3_dflash._resolve_layer_attention``, which these checkpoints were made for).

    Returns:
        the windows, and whether sliding layers are causal by default.
    """
    types = layer_types(config, num_layers)
    any_sliding = types is not None and SLIDING in types
    use_swa = fields.boolean("use_swa", default=any_sliding)
    flag = config.optional_boolean("use_sliding_window")
    if flag is not None and flag != use_swa:
        raise config.error("use_sliding_window", f"the same value as use_swa ({str(use_swa).lower()})")
    if not use_swa:
        if any_sliding:
            raise fields.error("use_swa", f'true, because layer_types has "{SLIDING}"')
        if fields.has("swa_window_size") and not fields.has("use_swa"):
            raise fields.error("swa_window_size", "nothing: neither use_swa nor a sliding layer type is given")
        return (LayerWindow(sliding=False, window=None),) * num_layers, False
    window = fields.optional_integer("swa_window_size", minimum=1)
    outer = config.optional_integer("sliding_window", minimum=1)
    if window is not None and outer is not None and window != outer:
        raise config.error("sliding_window", f"the same value as swa_window_size ({window})")
    window = window if window is not None else outer
    if window is None:
        raise fields.error("swa_window_size", "an integer >= 1, because use_swa is true")
    sliding = [kind == SLIDING for kind in types] if types is not None and any_sliding else [True] * num_layers
    return tuple(LayerWindow(slides, window if slides else None) for slides in sliding), any_sliding


def refuse_side_files(config: JsonObject) -> None:
    """Refuse checkpoints that keep part of the model in files of their own (``mask_embedding.pt``).

    Raises:
        ConfigError: such a file lies beside the config.json.
    """
    side_file = config.file.with_name("mask_embedding.pt")
    if side_file.exists():
        raise ConfigError(
            f"{side_file}: found a stored mask embedding, expected a mask_token_id only",
            hint="drafters with a mask embedding of their own are not supported",
        )

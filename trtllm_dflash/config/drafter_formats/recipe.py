"""Rules that every drafter format shares: what a DFlash recipe may contain, whatever its file calls the fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash.config.drafter import ConvConfig, SelectorConfig
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.rope_parsing import parse_rope

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""The recipe fields of DFlash 2: all of them or none."""

MAX_BLOCK_SIZE = 64
"""Well above every published drafter (16); beyond it the number is a mistake, not a block size."""

_UNSUPPORTED = {
    "v_head_dim": "value heads of another size than head_dim",
    "attention_value_scale": "a scale on attention values",
    "value_scale": "a scale on attention values",
    "add_swa_attention_sink_bias": "attention sinks",
    "add_full_attention_sink_bias": "attention sinks",
    "attention_sinks": "attention sinks",
    "attention_sink_bias": "attention sinks",
    "gating": "a gate per attention head",
    "use_head_gate": "a gate per attention head",
    "use_aux_hidden_norms": "norms on single captured features",
    "aux_hidden_norms": "norms on single captured features",
    "has_embed_tokens": "an embedding table of its own",
    "mask_embedding": "a stored mask embedding",
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a drafter's Qwen3-shaped decoder layers, named as in ``DrafterConfig``."""

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
    attention_bias: bool


def parse_geometry(layers: JsonObject, *, head_dim_default: int | None = 128) -> Geometry:
    """Sizes and rotary embedding of the decoder layers; defaults are those of transformers' ``Qwen3Config``.

    Args:
        layers: the object that holds the sizes.
        head_dim_default: head size where the file has none; None means hidden_size / num_attention_heads.

    Raises:
        ConfigError: missing or impossible values, or a variant that is not supported, by name.
    """
    activation = layers.string("hidden_act", default="silu")
    if activation != "silu":
        raise layers.error("hidden_act", '"silu"')
    num_heads = layers.integer("num_attention_heads", minimum=1)
    num_kv_heads = layers.integer("num_key_value_heads", default=num_heads, minimum=1)
    if num_heads % num_kv_heads:
        raise layers.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    hidden_size = layers.integer("hidden_size", minimum=1)
    head_dim = layers.integer("head_dim", default=head_dim_default or hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise layers.error("head_dim", "an even number (rotary embeddings rotate pairs)")
    max_positions = layers.integer("max_position_embeddings", minimum=1)
    return Geometry(
        vocab_size=layers.integer("vocab_size", minimum=1),
        num_layers=layers.integer("num_hidden_layers", minimum=1),
        hidden_size=hidden_size,
        intermediate_size=layers.integer("intermediate_size", minimum=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=layers.number("rms_norm_eps", default=1e-6, above=0),
        rope=parse_rope(layers, head_dim=head_dim, max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
        attention_bias=layers.boolean("attention_bias", default=False),
    )


def refuse_variants(*places: JsonObject) -> None:
    """Refuse drafter variants whose computation differs from DFlash and DFlash 2, naming the variant.

    Raises:
        ConfigError: a field of such a variant is set to anything but false, zero or head_dim.
    """
    for place in places:
        for key, meaning in _UNSUPPORTED.items():
            value = place.data.get(key)
            harmless = value in (None, False, 0, "") or (key == "v_head_dim" and value == place.data.get("head_dim"))
            if not harmless and not (key == "attention_value_scale" and value == 1):
                raise place.error(key, f"nothing: drafters with {meaning} are not supported")
        if place.optional_boolean("sample_from_anchor"):
            raise place.error(
                "sample_from_anchor",
                "false: drafters whose anchor row proposes a token are not supported (row 0 is never a proposal here)",
            )


def parse_dflash2_recipe(fields: JsonObject, *, hidden_size: int, vocab_size: int) -> tuple[ConvConfig, SelectorConfig]:
    """Convolution and selector of DFlash 2.

    Raises:
        ConfigError: a field is missing, the group does not divide the hidden size, or fewer than two candidates.
    """
    missing = [key for key in DFLASH2_KEYS if not fields.has(key)]
    if missing:
        raise fields.error(missing[0], f"an integer; a DFlash 2 recipe needs all of {', '.join(DFLASH2_KEYS)}")
    group = fields.integer("conv_group_size", minimum=1)
    if hidden_size % group:
        raise fields.error("conv_group_size", f"a divisor of hidden_size ({hidden_size})")
    conv = ConvConfig(kernel_size=fields.integer("conv_kernel_size", minimum=1), group_size=group)
    # One candidate leaves nothing to select: the walk would be the argmax that DFlash 1 proposes anyway.
    top_k = fields.integer("selector_top_k", minimum=2, maximum=vocab_size)
    return conv, SelectorConfig(rank=fields.integer("selector_rank", minimum=1), top_k=top_k)


def check_layer_ids(
    place: JsonObject, key: str, ids: Sequence[int], *, first: int, num_target_layers: int | None
) -> None:
    """Check captured layer ids as the file gives them; any order is right, the features follow it.

    Args:
        place, key: where the ids are written. ids: as written.
        first: id that the format gives to the output of the target's first layer.
        num_target_layers: layers of the target where known.

    Raises:
        ConfigError: none, duplicates, or out of range.
    """
    if not ids:
        raise place.error(key, "at least one layer id")
    duplicates = sorted({i for i in ids if list(ids).count(i) > 1})
    if duplicates:
        raise place.error(key, f"different layer ids; duplicates: {', '.join(map(str, duplicates))}")
    last = None if num_target_layers is None else num_target_layers - 1 + first
    wrong = [i for i in ids if i < first or (last is not None and i > last)]
    if wrong:
        limits = f">= {first}" if last is None else f"in [{first}, {last}] (the target has {num_target_layers} layers)"
        raise place.error(key, f"layer ids {limits}; out of range: {', '.join(map(str, wrong))}")

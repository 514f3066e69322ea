"""What a target family is to the configuration room: how its config.json reads and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.target import TargetConfig


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's tensors in a Hugging Face checkpoint. ``{n}`` is the layer number.

    The defaults are those that Llama started and most dense decoders keep.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{n}."
    input_norm: str = "input_layernorm.weight"
    post_attention_norm: str = "post_attention_layernorm.weight"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm.weight"
    key_norm: str = "self_attn.k_norm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Endings of tensors that old checkpoints carry and no network needs (recomputed buffers)."""


@dataclass(frozen=True)
class Family:
    """A target family. A module of this package that defines ``FAMILY`` is registered by being there.

    Attributes:
        name: key of the registry, ``TargetConfig.family``.
        architectures: Hugging Face architecture names.
        parse: config.json → TargetConfig; receives the architecture found and the compute dtype.
        tensor_names: names of the source tensors.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[JsonObject, str, str], TargetConfig]
    tensor_names: TensorNames = field(default_factory=TensorNames)

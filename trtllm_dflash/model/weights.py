"""The weights of the networks as typed records, filled from a checkpoint's tensors by name.

Names are the checkpoint directory's (TensorRT-LLM layout). ``load`` turns a name into the dialect's tensor and
``matrix`` turns a ``[out, in]`` tensor into what the dialect's ``linear`` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.ops.interface import Linear

T = TypeVar("T")


class WeightSource(Protocol[T]):
    """Where a dialect's loader gets weights from."""

    def tensor(self, name: str) -> T:
        """The tensor ``name``, in its stored or compute dtype."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has ``name``."""

    def linear(self, names: list[str], *, bias: bool = False, rows: tuple[int, int] | None = None) -> Linear[T]:
        """The projections ``name.weight`` stacked along the output axis (with ``name.bias`` if ``bias``); ``rows``
        takes only output rows first .. last of each."""


@dataclass(frozen=True)
class AttentionWeights(Generic[T]):
    """``qkv`` gives q heads, then k heads, then v heads."""

    qkv: Linear[T]
    dense: Linear[T]
    q_norm: T | None
    k_norm: T | None


@dataclass(frozen=True)
class MlpWeights(Generic[T]):
    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True)
class ConvWeights(Generic[T]):
    """``projection`` gives both sides' deltas, side 0 (sublayer input) first, ``side_columns`` each; ``bases`` are
    ``[taps, H]`` per side."""

    projection: Linear[T]
    bases: tuple[T, T]
    side_columns: int


@dataclass(frozen=True)
class LayerWeights(Generic[T]):
    input_norm: T
    attention: AttentionWeights[T]
    post_norm: T
    mlp: MlpWeights[T]
    attention_conv: ConvWeights[T] | None = None
    mlp_conv: ConvWeights[T] | None = None


@dataclass(frozen=True)
class TargetWeights(Generic[T]):
    """``embedding`` is a table for ``Ops.embedding``; ``head`` a projection (the same storage when tied and plain)."""

    embedding: Any
    layers: tuple[LayerWeights[T], ...]
    final_norm: T
    head: Linear[T]


@dataclass(frozen=True)
class SelectorWeights(Generic[T]):
    predecessor: T
    successor: T
    hidden_projection: Linear[T]


@dataclass(frozen=True)
class DrafterWeights(Generic[T]):
    """``inject_kv`` stacks the K and V rows of every layer (layer-major, K then V) so that injection is one product.

    ``own_head`` and ``token_offsets`` (d2t) exist only for a reduced draft vocabulary.
    """

    fc: Linear[T]
    feature_norm: T
    inject_kv: Linear[T]
    layers: tuple[LayerWeights[T], ...]
    final_norm: T
    selector: SelectorWeights[T] | None
    own_head: Linear[T] | None
    token_offsets: T | None


def target_weights(config: TargetConfig, source: WeightSource[T]) -> TargetWeights[T]:
    """Collect the target's weights."""
    head = "transformer.vocab_embedding" if not source.has("lm_head.weight") else "lm_head"
    return TargetWeights(
        embedding=source.tensor("transformer.vocab_embedding.weight"),
        layers=tuple(
            _layer(
                source,
                index,
                qk_norm=config.qk_norm,
                qkv_bias=config.attention_bias,
                dense_bias=config.attention_output_bias,
                mlp_bias=config.mlp_bias,
            )
            for index in range(config.num_layers)
        ),
        final_norm=source.tensor("transformer.ln_f.weight"),
        head=source.linear([head]),
    )


def drafter_weights(config: DrafterConfig, source: WeightSource[T]) -> DrafterWeights[T]:
    """Collect the drafter's weights."""
    q_rows = config.num_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim
    conv = config.conv
    conv_columns = 0 if conv is None else conv.kernel_size * config.hidden_size // conv.group_size
    layers = tuple(
        _layer(
            source,
            index,
            qk_norm=config.qk_norm,
            qkv_bias=config.attention_bias,
            dense_bias=config.attention_bias,
            mlp_bias=False,
            conv_columns=conv_columns,
        )
        for index in range(config.num_layers)
    )
    selector = None
    if config.selector is not None:
        selector = SelectorWeights(
            predecessor=source.tensor("candidate_selector.predecessor_codebook"),
            successor=source.tensor("candidate_selector.successor_codebook"),
            hidden_projection=source.linear(["candidate_selector.hidden_projection"]),
        )
    reduced = config.draft_vocab_size is not None
    return DrafterWeights(
        fc=source.linear(["fc"]),
        feature_norm=source.tensor("hidden_norm.weight"),
        inject_kv=source.linear(
            [f"transformer.layers.{index}.attention.qkv" for index in range(config.num_layers)],
            bias=config.attention_bias,
            rows=(q_rows, qkv_rows),
        ),
        layers=layers,
        final_norm=source.tensor("transformer.ln_f.weight"),
        selector=selector,
        own_head=source.linear(["lm_head"]) if reduced else None,
        token_offsets=source.tensor("d2t") if reduced else None,
    )


def _layer(
    source: WeightSource[T],
    index: int,
    *,
    qk_norm: bool,
    qkv_bias: bool,
    dense_bias: bool,
    mlp_bias: bool,
    conv_columns: int = 0,
) -> LayerWeights[T]:
    prefix = f"transformer.layers.{index}."
    return LayerWeights(
        input_norm=source.tensor(prefix + "input_layernorm.weight"),
        attention=AttentionWeights(
            qkv=source.linear([prefix + "attention.qkv"], bias=qkv_bias),
            dense=source.linear([prefix + "attention.dense"], bias=dense_bias),
            q_norm=source.tensor(prefix + "attention.q_layernorm.weight") if qk_norm else None,
            k_norm=source.tensor(prefix + "attention.k_layernorm.weight") if qk_norm else None,
        ),
        post_norm=source.tensor(prefix + "post_layernorm.weight"),
        mlp=MlpWeights(
            gate_up=source.linear([prefix + "mlp.fc", prefix + "mlp.gate"], bias=mlp_bias),
            down=source.linear([prefix + "mlp.proj"], bias=mlp_bias),
        ),
        attention_conv=_conv(source, prefix + "attention_conv", conv_columns) if conv_columns else None,
        mlp_conv=_conv(source, prefix + "mlp_conv", conv_columns) if conv_columns else None,
    )


def _conv(source: WeightSource[T], prefix: str, side_columns: int) -> ConvWeights[T]:
    base: Any = source.tensor(prefix + ".base_kernel")
    return ConvWeights(
        projection=source.linear([prefix + ".kernel_projection"]), bases=(base[0], base[1]), side_columns=side_columns
    )

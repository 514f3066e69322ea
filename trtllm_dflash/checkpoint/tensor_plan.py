"""The plan of a conversion: each tensor of the checkpoint, what it is made of, and how it is dealt out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from trtllm_dflash.checkpoint.quantize import WEIGHT, check_quantizable, quantize, quantized_specs
from trtllm_dflash.checkpoint.safetensors_writer import TensorSpec
from trtllm_dflash.checkpoint.sharding import COLUMNS, REPLICATED, Segment, ShardRule, rows
from trtllm_dflash.checkpoint.tensor_source import TensorSource
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.families.family import TensorNames
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import CheckpointError

# Parts of tensor names that tell it where config.json does not: some exporters keep that in a file of its own.
_STORED_QUANTISED = dict.fromkeys(
    ("weight_scale", "input_scale", "weight_packed", "qweight", "qzeros"), "weights that are stored quantised"
)
_UNQUANTISED = "convert the original checkpoint; a target's weights are quantised with --quantization"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the checkpoint.

    Attributes:
        name: its name there.
        shape: whole shape, before sharding.
        sources: source tensors, stacked along axis 0, with the shape each must have. Together they may have fewer
            rows than ``shape``, then zeros follow, or more, then the last are left out.
        rule: how it is dealt out over ranks.
        quantize: it is the weight of a linear that ``--quantization`` applies to.
        extra_rows: the sources may have more rows than given (a padded vocabulary), which are left out.
        integers: keep as int64 instead of converting to the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    rule: ShardRule = REPLICATED
    quantize: bool = False
    extra_rows: bool = False
    integers: bool = False

    def check(self, source: TensorSource) -> None:
        """Check names and shapes of the sources.

        Raises:
            CheckpointError: missing or of the wrong shape.
        """
        for name, shape in self.sources:
            source.require(name, shape, extra_rows=self.extra_rows)

    def specs(self, dtype: torch.dtype, algo: QuantAlgo, tp_size: int) -> list[TensorSpec]:
        """What one rank's file holds of this tensor."""
        if self.integers:
            return [TensorSpec(self.name, torch.int64, self.shape)]
        if not self.quantize or algo == "none":
            return [TensorSpec(self.name, dtype, self.rule.shard_shape(self.shape, tp_size))]
        part = self.rule.shard_shape(self.shape, tp_size)
        check_quantizable(self.name, part[1], algo)
        parts = quantized_specs((self.shape[0], self.shape[1]), algo)
        return [
            TensorSpec(self._ending(ending), kind, self.rule.shard_shape(shape, tp_size))
            for ending, (kind, shape) in parts.items()
        ]

    def load(self, source: TensorSource, dtype: torch.dtype, algo: QuantAlgo) -> dict[str, torch.Tensor]:
        """Read, stack, convert and quantise: whole tensors by name, before sharding."""
        if self.integers:
            ((name, _),) = self.sources
            return {self.name: source.read_integers(name)}
        whole, start = torch.empty(self.shape, dtype=dtype), 0
        for name, shape in self.sources:
            part = whole[start : start + shape[0]]
            source.read_into(name, part)
            start += len(part)
        whole[start:] = 0
        if not self.quantize or algo == "none":
            return {self.name: whole}
        return {self._ending(ending): part for ending, part in quantize(whole, algo).items()}

    def _ending(self, ending: str) -> str:
        return self.name.removesuffix(WEIGHT) + ending


@dataclass
class Plan:
    """The tensors of one model.

    Attributes:
        model: ``target`` or ``drafter``.
        tensors: what the checkpoint will hold.
        ignored: endings of source tensors that are left out on purpose; any other unused one is an error.
    """

    model: str
    tensors: list[PlannedTensor] = field(default_factory=list)
    ignored: tuple[str, ...] = ()

    def check(self, source: TensorSource, *, refused: dict[str, str] | None = None) -> None:
        """Check the whole plan against the source before anything is written.

        Args:
            source: the checkpoint.
            refused: parts of unexpected names → the unsupported feature they belong to.

        Raises:
            CheckpointError: missing, unexpected or wrongly shaped tensors.
        """
        used = {name for tensor in self.tensors for name, _ in tensor.sources}
        unexpected = [n for n in source.tensors if n not in used and not n.endswith(self.ignored or ("\0",))]
        # Before shapes: a feature of another kind explains why they are other ones too.
        for name in unexpected:
            for part, feature in {**_STORED_QUANTISED, **(refused or {})}.items():
                if part in name:
                    raise CheckpointError(
                        f"{source.tensors[name].file}: tensor '{name}': {self.model}s with {feature} are not supported",
                        hint=_UNQUANTISED if part in _STORED_QUANTISED else None,
                    )
        for tensor in self.tensors:
            tensor.check(source)
        if unexpected:
            shown = ", ".join(f"'{name}' {list(source.tensors[name].shape)}" for name in unexpected[:5])
            more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
            raise CheckpointError(
                f"{source.tensors[unexpected[0]].file}: {len(unexpected)} tensors that a {self.model} of this "
                f"config.json does not have: {shown}{more}",
                hint="the weights do not belong to this config.json, or the architecture is another one",
            )


def decoder_layers(
    config: TargetConfig | DrafterConfig, names: TensorNames, *, output_bias: bool, mlp_bias: bool, quantize: bool
) -> Iterable[PlannedTensor]:
    """The attention and MLP tensors of every decoder layer, target's and drafter's alike.

    Args:
        config: geometry. names: source names. output_bias, mlp_bias: which projections have biases.
        quantize: whether ``--quantization`` applies to the linears.
    """
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv_rule = rows(
        Segment(q_rows, config.num_heads),
        Segment(kv_rows, config.num_kv_heads, replicate=True),
        Segment(kv_rows, config.num_kv_heads, replicate=True),
    )
    inner_rule = rows(Segment(inner, inner))
    qkv = ((names.query, q_rows), (names.key, kv_rows), (names.value, kv_rows))
    for n in range(config.num_layers):
        source, layer = names.layer.format(n=n), f"transformer.layers.{n}."
        yield _norm(layer + "input_layernorm.weight", source + names.input_norm, hidden)
        yield PlannedTensor(
            layer + "attention.qkv.weight",
            (q_rows + 2 * kv_rows, hidden),
            tuple((f"{source}{name}.weight", (count, hidden)) for name, count in qkv),
            qkv_rule,
            quantize=quantize,
        )
        if config.attention_bias:
            yield PlannedTensor(
                layer + "attention.qkv.bias",
                (q_rows + 2 * kv_rows,),
                tuple((f"{source}{name}.bias", (count,)) for name, count in qkv),
                qkv_rule,
            )
        yield _linear(layer + "attention.dense", source + names.output, (hidden, q_rows), COLUMNS, quantize)
        if output_bias:
            # Added once, after the sum over ranks, so every rank holds it whole.
            yield _bias(layer + "attention.dense", source + names.output, hidden, COLUMNS)
        if config.qk_norm:
            yield _norm(layer + "attention.q_layernorm.weight", source + names.query_norm, head_dim)
            yield _norm(layer + "attention.k_layernorm.weight", source + names.key_norm, head_dim)
        yield _norm(layer + "post_layernorm.weight", source + names.post_attention_norm, hidden)
        for ours, theirs, shape, rule in (
            ("mlp.fc", names.gate, (inner, hidden), inner_rule),
            ("mlp.gate", names.up, (inner, hidden), inner_rule),
            ("mlp.proj", names.down, (hidden, inner), COLUMNS),
        ):
            yield _linear(layer + ours, source + theirs, shape, rule, quantize)
            if mlp_bias:
                yield _bias(layer + ours, source + theirs, shape[0], rule)


def plain(name: str, source: str, shape: tuple[int, ...]) -> PlannedTensor:
    """A tensor that every rank holds whole, from one source tensor of the same shape."""
    return PlannedTensor(name, shape, ((source, shape),))


def _norm(name: str, source: str, size: int) -> PlannedTensor:
    return plain(name, source, (size,))


def _linear(name: str, source: str, shape: tuple[int, int], rule: ShardRule, quantize: bool) -> PlannedTensor:
    return PlannedTensor(f"{name}.weight", shape, ((f"{source}.weight", shape),), rule, quantize=quantize)


def _bias(name: str, source: str, size: int, rule: ShardRule) -> PlannedTensor:
    return PlannedTensor(f"{name}.bias", (size,), ((f"{source}.bias", (size,)),), rule)

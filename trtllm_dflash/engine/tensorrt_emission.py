"""What emitting a network needs and what it leaves behind; the same for both lowerings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.plan_facts import Lowering, Network, TensorFacts, WeightBinding, WeightsMode
from trtllm_dflash.engine.tensorrt_weights import TensorRTWeightSource, dtype_name
from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.ops.tensorrt_dense import RotaryTable
from trtllm_dflash.ops.tensorrt_library import ErrorLog, TensorRTLibrary
from trtllm_dflash.ops.tensorrt_network import Columns, NetworkTensor, NetworkWriter
from trtllm_dflash.ops.tensorrt_plugin import PluginLayers

_ROW_MULTIPLE = 64
_FIRST_BUCKET, _BUCKET_GROWTH = 4, 8
PREFILL_OPTIMUM = 512
"""Prefill tokens that kernels are chosen for."""


@dataclass(frozen=True)
class NetworkRequest:
    """Which networks to emit, of what, for one rank.

    Attributes:
        library: TensorRT. lowering: of the special operations. weights: where weights go.
        target_config, drafter_config: whole models (not one rank's part); no drafter is None.
        limits: of the engine. dtype: compute and cache dtype.
        target, drafter: this rank's tensors, plain or quantised. rank, ranks: tensor parallelism.
        plugins: adds plugin layers, for the plugin lowering. new_definition: makes a network of a builder instead of
            ``create_network`` (a recorder that stands in for plugin layers where TensorRT has none).
    """

    library: TensorRTLibrary
    lowering: Lowering
    weights: WeightsMode
    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    limits: BuildLimits
    dtype: torch.dtype
    target: Mapping[str, Tensor]
    drafter: Mapping[str, Tensor] | None
    rank: int = 0
    ranks: int = 1
    plugins: PluginLayers | None = None
    new_definition: Callable[[Any], Any] | None = None

    @property
    def drafter_facts(self) -> DrafterConfig:
        """The drafter's configuration where there must be one."""
        if self.drafter_config is None:
            raise BuildError("there is no drafter to build inject and draft networks for")
        return self.drafter_config

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks of this engine."""
        return ("target",) if self.drafter_config is None else ("target", "inject", "draft")


@dataclass(frozen=True)
class InputSpec:
    """A network input; a letter in ``shape`` is a dimension that profiles give a range."""

    name: str
    dtype: Any
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Profile:
    """Ranges of the dynamic dimensions: letter → (minimum, optimum, maximum)."""

    name: str
    ranges: Mapping[str, tuple[int, int, int]]

    def shapes(self, spec: InputSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Minimum, optimum and maximum shape of an input."""
        minimum, optimum, maximum = (
            tuple(dim if isinstance(dim, int) else self.ranges[dim][at] for dim in spec.shape) for at in range(3)
        )
        return minimum, optimum, maximum


@dataclass
class EmittedNetwork:
    """A network that is ready to be built.

    Attributes:
        name: which. builder, network: TensorRT's objects. writer: keeps constants alive. log: TensorRT's log.
        inputs: non-weight inputs. profiles: for them. sources: weights used. row_tokens: of a linear cache.
    """

    name: Network
    builder: Any
    network: Any
    writer: NetworkWriter
    log: ErrorLog
    inputs: list[InputSpec] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    sources: list[TensorRTWeightSource] = field(default_factory=list)
    row_tokens: int = 0

    @property
    def bindings(self) -> list[WeightBinding]:
        """What is to be bound to the weight inputs."""
        return [binding for source in self.sources for binding in source.bindings]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the network uses."""
        return sum(source.weight_bytes for source in self.sources)

    def input(self, name: str, dtype: Any, *shape: int | str) -> Columns:
        """Add a non-weight input."""
        spec = InputSpec(name, dtype, shape)
        self.inputs.append(spec)
        dims = [dim if isinstance(dim, int) else -1 for dim in shape]
        return Columns((self.writer.input(name, dtype, dims),))

    def caches(self, request: NetworkRequest, layers: int, shape: Sequence[int | str]) -> list[CacheLayer[Columns]]:
        """Cache inputs ``k_cache.N`` and ``v_cache.N`` of every layer."""
        dtype = self.writer.dtype(request.dtype)
        return [
            CacheLayer(
                self.input(f"k_cache.{layer}", dtype, *shape),
                self.input(f"v_cache.{layer}", dtype, *shape),
            )
            for layer in range(layers)
        ]

    def cache_outputs(self, updated: Mapping[str, NetworkTensor]) -> None:
        """Mark updated caches as outputs ``k_cache_out.N``; each is bound to the address of its input."""
        for name, tensor in updated.items():
            self.writer.output(name.replace("_cache.", "_cache_out."), tensor)

    def weights(self, request: NetworkRequest, model: Literal["target", "drafter"]) -> TensorRTWeightSource:
        """The weights of one of the models in this network."""
        tensors = request.target if model == "target" else request.drafter
        if tensors is None:
            raise BuildError(f"network {self.name}: there are no {model} tensors")
        source = TensorRTWeightSource(
            self.writer,
            model,
            tensors,
            dtype=request.dtype,
            mode=request.weights,
            row_rank=2 if request.lowering == "native" else 1,
            rank=request.rank,
            ranks=request.ranks,
            vocab_size=request.target_config.vocab_size,
        )
        self.sources.append(source)
        return source

    def finish(self) -> EmittedNetwork:
        """See that nothing went wrong unnoticed."""
        self.log.check(f"network {self.name}")
        return self

    def facts(self) -> tuple[tuple[TensorFacts, ...], tuple[TensorFacts, ...]]:
        """Non-weight inputs and outputs."""
        inputs = tuple(
            TensorFacts(s.name, dtype_name(s.dtype), tuple(d if isinstance(d, int) else -1 for d in s.shape))
            for s in self.inputs
        )
        outputs = []
        for index in range(self.network.num_outputs):
            tensor = self.network.get_output(index)
            outputs.append(TensorFacts(tensor.name, dtype_name(tensor.dtype), tuple(tensor.shape)))
        return inputs, tuple(outputs)


def new_network(request: NetworkRequest, name: Network) -> EmittedNetwork:
    """An empty, strongly typed network."""
    log = ErrorLog(request.library)
    builder = request.library.trt.Builder(log.logger)
    log.take_errors()
    network = builder.create_network(0) if request.new_definition is None else request.new_definition(builder)
    if network is None:
        raise BuildError(f"network {name}: TensorRT made no network: {'; '.join(log.take_errors())}")
    return EmittedNetwork(name, builder, network, NetworkWriter(request.library, log, network), log)


def rotary_inputs(emitted: EmittedNetwork, positions: int, rotary_dim: int) -> RotaryTable:
    """Cosine and sine tables as inputs; the session makes them once from the model's rotary parameters."""
    dtype = emitted.writer.trt.float32
    cos = emitted.input("rotary_cos", dtype, positions, rotary_dim // 2)
    sin = emitted.input("rotary_sin", dtype, positions, rotary_dim // 2)
    return RotaryTable(cos.parts[0], sin.parts[0])


def rank_target(request: NetworkRequest) -> TargetConfig:
    """The target as one rank computes it."""
    config = request.target_config
    return replace(
        config,
        num_heads=config.num_heads // request.ranks,
        num_kv_heads=heads_of_rank(config.num_kv_heads, request.ranks),
        intermediate_size=config.intermediate_size // request.ranks,
    )


def rank_drafter(request: NetworkRequest) -> DrafterConfig:
    """The drafter as one rank computes it."""
    config = request.drafter_facts
    return replace(
        config,
        num_heads=config.num_heads // request.ranks,
        num_kv_heads=heads_of_rank(config.num_kv_heads, request.ranks),
        intermediate_size=config.intermediate_size // request.ranks,
    )


def heads_of_rank(heads: int, ranks: int) -> int:
    """Key/value heads of one rank; ranks share a head where there are fewer heads than ranks."""
    return heads // ranks if heads % ranks == 0 else 1


def linear_row_tokens(limits: BuildLimits) -> int:
    """Positions of one row of a linear cache: a sequence, and a block that may reach past its end."""
    return -(-(limits.max_seq_len + limits.block_size) // _ROW_MULTIPLE) * _ROW_MULTIPLE


def prefill_queries(limits: BuildLimits) -> int:
    """Tokens of the largest prefill pass of one request."""
    return min(limits.max_num_tokens, limits.max_seq_len)


def paged_positions(limits: BuildLimits) -> int:
    """Positions that a paged engine rotates: a sequence, and a block that may reach past its end."""
    return limits.max_seq_len + limits.block_size


def row_buckets(most: int) -> list[int]:
    """Largest number of requests of each verify profile; buckets grow eightfold, a short rest joins the last."""
    buckets, bucket = [], _FIRST_BUCKET
    while 2 * bucket <= most:
        buckets.append(bucket)
        bucket *= _BUCKET_GROWTH
    return [*buckets, most]

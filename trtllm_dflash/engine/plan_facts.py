"""What is known of a plan without loading it: its inputs, outputs, weights, profiles and layers. Stored as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Network = Literal["target", "inject", "draft"]
Lowering = Literal["native", "plugin"]
WeightsMode = Literal["external", "embedded"]


@dataclass(frozen=True)
class TensorFacts:
    """A network input or output: ``dtype`` is TensorRT's lower-case name, -1 in ``shape`` is dynamic."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightBinding:
    """Which checkpoint tensor is bound to a network input.

    Attributes:
        input: the network input. model: ``target`` or ``drafter``, whose rank file has the tensor. tensor: its name.
        rows: first and last + 1 row of the tensor's first axis, or None for all of it; a contiguous part, so that it
            is bound without a copy.
        index: entry of the first axis, or None.
        dtype, shape: of the input. A tensor of packed fp4 has half as many bytes in its last axis.
    """

    input: str
    model: Literal["target", "drafter"]
    tensor: str
    rows: tuple[int, ...] | None
    index: int | None
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of one input in one profile."""

    input: str
    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


@dataclass(frozen=True)
class ProfileFacts:
    """An optimisation profile: ``prefill`` or ``verify`` of at most ``rows`` requests and ``queries`` tokens each."""

    name: str
    rows: int
    queries: int
    ranges: tuple[ShapeRange, ...]


@dataclass(frozen=True)
class CountFacts:
    """A name and how often it occurs."""

    name: str
    count: int


@dataclass(frozen=True)
class PlanFacts:
    """One network of one rank.

    Attributes:
        network: which of the three. file: the plan, relative to the engine directory.
        lowering: how special operations were written. weights: where the weights are.
        inputs, outputs, bindings, profiles: see their classes; ``inputs`` leaves out weights.
        layers: layers of the network by type, before TensorRT fuses them. precisions: layers by output dtype.
        plan_bytes: size of the plan. build_s: seconds. plan_sha256 is in the directory's manifest.
        weight_bytes: bytes of the weights that the plan uses.
        cache_rows_tokens: tokens of one row of a linear cache; 0 for paged caches.
    """

    network: Network
    file: str
    lowering: Lowering
    weights: WeightsMode
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    bindings: tuple[WeightBinding, ...]
    profiles: tuple[ProfileFacts, ...]
    layers: tuple[CountFacts, ...]
    precisions: tuple[CountFacts, ...]
    plan_bytes: int
    build_s: float
    weight_bytes: int
    cache_rows_tokens: int


@dataclass(frozen=True)
class PluginLibraryFacts:
    """The plugin library that plans need.

    Attributes:
        file: relative to the engine directory. sha256: of the file. version: of the toolkit that it was compiled from.
        cuda: toolkit version. sm: compiled GPU architectures, such as ``90a``.
    """

    file: str
    sha256: str
    version: str
    cuda: str
    sm: tuple[str, ...]


@dataclass(frozen=True)
class TensorRTFacts:
    """The ``tensorrt`` object of an engine directory's config.json.

    Attributes:
        package, version: what built the plans. target_sm: compute capabilities, 10 * major + minor.
        lowering, weights: see :class:`PlanFacts`. cache: ``linear`` or ``paged``.
        row_tokens: tokens of one row of a linear cache; 0 for paged caches.
        peak_host_mb: peak resident memory of the build.
        plugin_library: of the plugin lowering, else None.
    """

    package: str
    version: str
    target_sm: tuple[int, ...]
    lowering: Lowering
    weights: WeightsMode
    cache: Literal["linear", "paged"]
    row_tokens: int
    peak_host_mb: float
    plugin_library: PluginLibraryFacts | None

"""From an emitted network to a plan: builder configuration, profiles, progress, and errors that name our layers."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trtllm_dflash.engine.plan_facts import (
    CountFacts,
    Lowering,
    PlanFacts,
    ProfileFacts,
    ShapeRange,
    WeightsMode,
)
from trtllm_dflash.engine.tensorrt_emission import EmittedNetwork
from trtllm_dflash.engine.tensorrt_weights import dtype_name
from trtllm_dflash.errors import BuildError, ConfigError
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

BuildProgress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in all)."""

DEFAULT_RTX_SM = (120,)
"""Blackwell GPUs that TensorRT-RTX supports."""


@dataclass(frozen=True)
class CompileOptions:
    """How plans are built.

    Attributes:
        target_sm: compute capabilities, 10 * major + minor. timing_cache: contents of a timing cache to start from.
        progress: told about the builder's phases. between_steps: called between its steps, on its thread.
    """

    target_sm: tuple[int, ...]
    timing_cache: bytes | None = None
    progress: BuildProgress | None = None
    between_steps: Callable[[], None] | None = None


@dataclass(frozen=True)
class CompiledPlan:
    """Facts of a plan that was written, and the timing cache after it (None where there is none)."""

    facts: PlanFacts
    timing_cache: bytes | None


def choose_target_sm(library: TensorRTLibrary, wanted: Sequence[int], *, device_sm: int | None) -> tuple[int, ...]:
    """Compute capabilities to build for.

    Args:
        library: TensorRT. wanted: what the user asked for, empty for the default.
        device_sm: of the GPU in this machine, None without one.

    Raises:
        ConfigError: a capability that this TensorRT cannot build for. BuildError: full TensorRT without a GPU.
    """
    if library.is_rtx:
        known = rtx_capabilities(library)
        for sm in wanted:
            if sm not in known:
                raise ConfigError(
                    f"--target-sm {sm}: {library.backend} {library.version} builds for "
                    f"{', '.join(map(str, sorted(known)))}",
                    hint="data-centre GPUs (90, 100, 103) need --backend tensorrt on such a GPU",
                )
        return tuple(wanted) or DEFAULT_RTX_SM
    if device_sm is None:
        raise BuildError(
            "backend tensorrt: no CUDA GPU was found, and TensorRT builds on the GPU it builds for",
            hint="build on a machine with the GPU, or use --backend tensorrt-rtx, which needs none",
        )
    if wanted and tuple(wanted) != (device_sm,):
        raise ConfigError(
            f"--target-sm {','.join(map(str, wanted))}: TensorRT builds for the GPU of this machine, which is SM "
            f"{device_sm}",
            hint="leave --target-sm out, or build on the other GPU",
        )
    return (device_sm,)


def rtx_capabilities(library: TensorRTLibrary) -> dict[int, Any]:
    """Compute capabilities that TensorRT-RTX can build for."""
    members: Mapping[str, Any] = library.trt.ComputeCapability.__members__
    return {int(name[2:]): value for name, value in members.items() if re.fullmatch(r"SM\d+", name)}


def compile_plan(
    emitted: EmittedNetwork,
    file: Path,
    *,
    name: str,
    lowering: Lowering,
    weights: WeightsMode,
    options: CompileOptions,
) -> CompiledPlan:
    """Build ``emitted`` and write its plan to ``file``.

    Args:
        emitted: the network. file: plan file to write. name: its path in the engine directory, for the facts.
        lowering, weights: recorded. options: how.

    Raises:
        BuildError: TensorRT failed; the message names the layer of ours it is about, where TensorRT says.
    """
    started = time.perf_counter()
    config = emitted.builder.create_builder_config()
    _configure(emitted, config, options)
    if lowering == "plugin":
        # Layers that write a cache give it back as an output at the same address.
        config.set_preview_feature(emitted.writer.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    cache = _attach_timing_cache(emitted, config, options)
    # Named, because TensorRT keeps no reference of its own.
    monitor = _monitor(emitted, options)
    config.progress_monitor = monitor
    with file.open("wb") as out:
        # Straight to the file: a plan with embedded weights is never in memory a second time.
        writer = _writer(emitted, out)
        done = emitted.builder.build_serialized_network_to_stream(emitted.network, config, writer)
        size = out.tell()
    errors = emitted.log.take_errors()
    if not done or errors or size == 0:
        raise _build_error(emitted, errors, options.target_sm)
    layers, precisions = _layer_counts(emitted)
    inputs, outputs = emitted.facts()
    facts = PlanFacts(
        network=emitted.name,
        file=name,
        lowering=lowering,
        weights=weights,
        inputs=inputs,
        outputs=outputs,
        bindings=tuple(emitted.bindings),
        profiles=_profile_facts(emitted),
        layers=layers,
        precisions=precisions,
        plan_bytes=size,
        build_s=round(time.perf_counter() - started, 3),
        weight_bytes=emitted.weight_bytes,
        cache_rows_tokens=emitted.row_tokens,
    )
    return CompiledPlan(facts, None if cache is None else bytes(cache.serialize()))


def _configure(emitted: EmittedNetwork, config: Any, options: CompileOptions) -> None:
    library, trt = emitted.writer.library, emitted.writer.trt
    # Scores and norms are float32 on purpose; TF32 would round them to ten bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    if library.is_rtx:
        known = rtx_capabilities(library)
        config.num_compute_capabilities = len(options.target_sm)
        for index, sm in enumerate(options.target_sm):
            config.set_compute_capability(known[sm], index)
    else:
        # Names of layers and tactics in the plan, so that profiles of a running engine can be read.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for profile in emitted.profiles:
        shapes = emitted.builder.create_optimization_profile()
        for spec in emitted.inputs:
            if any(isinstance(dim, str) for dim in spec.shape):
                shapes.set_shape(spec.name, *profile.shapes(spec))
        if config.add_optimization_profile(shapes) < 0:
            raise BuildError(f"network {emitted.name}: TensorRT refused profile '{profile.name}'")
    emitted.log.check(f"network {emitted.name}: builder configuration")


def _attach_timing_cache(emitted: EmittedNetwork, config: Any, options: CompileOptions) -> Any:
    """A timing cache makes a second build fast; TensorRT-RTX measures nothing at build and has none."""
    if emitted.writer.library.is_rtx:
        return None
    cache = config.create_timing_cache(options.timing_cache or b"")
    if not config.set_timing_cache(cache, False):
        raise BuildError(
            "the timing cache is of another TensorRT or another GPU", hint="give another --timing-cache file"
        )
    return cache


def _writer(emitted: EmittedNetwork, out: BinaryIO) -> Any:
    trt = emitted.writer.trt

    class Writer(trt.IStreamWriter):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: Any) -> int:
            return out.write(data)

    return Writer()


def _monitor(emitted: EmittedNetwork, options: CompileOptions) -> Any:
    trt, label = emitted.writer.trt, emitted.name

    def tell(phase: str, done: int, total: int) -> None:
        if options.between_steps is not None:
            options.between_steps()
        if options.progress is not None:
            options.progress(f"{label}: {phase}", done, total)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            if parent_phase is None:
                tell(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            tell(phase_name, step + 1, self._steps.get(phase_name, 0))
            return True

        def phase_finish(self, phase_name: str) -> None:
            steps = self._steps.pop(phase_name, 0)
            tell(phase_name, steps, steps)

    return Monitor()


_HARDWARE_TYPES = re.compile(r"Cannot compile for target\(s\) (\w+).*datatypes: ([\w, ]+)")


def _build_error(emitted: EmittedNetwork, errors: Sequence[str], target_sm: Sequence[int]) -> BuildError:
    """TensorRT's reasons, with the layers of ours that they mention first."""
    text = "; ".join(errors) or "TensorRT gave no reason"
    ours = [layer for layer in _layer_names(emitted) if layer in text]
    place = f" at {', '.join(ours[:3])}" if ours else ""
    hint = None
    types = _HARDWARE_TYPES.search(text)
    if types:
        hint = (
            f"{types[2].strip()} does not exist on {types[1]}: choose another --target-sm or convert with another "
            "--quantization or --dtype"
        )
    elif "No space" in text or "out of memory" in text.lower():
        hint = "use --weights external, which needs little memory"
    targets = ", ".join(f"SM{sm}" for sm in target_sm)
    return BuildError(f"network {emitted.name} for {targets} could not be built{place}: {text}", hint=hint)


def _layer_names(emitted: EmittedNetwork) -> list[str]:
    network = emitted.network
    return sorted((network.get_layer(i).name for i in range(network.num_layers)), key=len, reverse=True)


def _layer_counts(emitted: EmittedNetwork) -> tuple[tuple[CountFacts, ...], tuple[CountFacts, ...]]:
    network = emitted.network
    kinds: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kinds[str(layer.type).rsplit(".", 1)[-1].lower()] += 1
        dtypes[dtype_name(layer.get_output(0).dtype)] += 1

    def facts(counter: Counter[str]) -> tuple[CountFacts, ...]:
        return tuple(CountFacts(name, count) for name, count in sorted(counter.items()))

    return facts(kinds), facts(dtypes)


def _profile_facts(emitted: EmittedNetwork) -> tuple[ProfileFacts, ...]:
    out = []
    for profile in emitted.profiles:
        ranges = tuple(
            ShapeRange(spec.name, *profile.shapes(spec))
            for spec in emitted.inputs
            if any(isinstance(dim, str) for dim in spec.shape)
        )
        # Queries of a request are S where they are a dimension of their own, M where rows are packed.
        rows, queries = profile.ranges["B"], profile.ranges.get("S") or profile.ranges["M"]
        out.append(ProfileFacts(profile.name, rows[2], queries[2], ranges))
    return tuple(out)

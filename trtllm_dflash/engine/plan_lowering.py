"""Choosing how special operations are written into plans, and what the plugin lowering needs before it can begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.manifest import hash_file
from trtllm_dflash.checkpoint.read import Checkpoint
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.directory import Backend
from trtllm_dflash.engine.plan_facts import Lowering, PluginLibraryFacts, WeightsMode
from trtllm_dflash.errors import BuildError, ConfigError, EngineError
from trtllm_dflash.ops.plugin_library import LIBRARY_NAME, LIBRARY_VARIABLE, candidate_paths, find_library, load_library
from trtllm_dflash.ops.tensorrt_plugin import PLUGIN_NAMES

_PLUGIN_DTYPES = ("bfloat16", "float16")
# Compiled instances of the attention kernels, and limits of the other plugins; see plugins/tensorrt/README.md.
_HEAD_DIMS = (64, 80, 96, 128, 256)
_MOST_INJECTED_LAYERS, _MOST_TAPS = 64, 8
_NATIVE_HINT = "or use --lowering native, which needs no plugins"


@dataclass(frozen=True)
class ChosenPluginLibrary:
    """A library that fits: the file it was found as, and what an engine directory records of it."""

    path: Path
    facts: PluginLibraryFacts


def choose_lowering(backend: Backend, wanted: Lowering | None, plugin_library: Path | None) -> Lowering | None:
    """How special operations are written into plans: ``plugin`` for full TensorRT and ``native`` for TensorRT-RTX,
    unless something else is wanted; None for torch, which has no plans.

    Args:
        backend: what is built for. wanted: asked for, or None. plugin_library: named by the user, or None.

    Raises:
        ConfigError: asked for something that the backend does not have, or for a library that nothing would use.
    """
    if wanted not in (None, "plugin", "native"):
        raise ConfigError(f"--lowering {wanted}: expected plugin or native")
    if backend == "torch" and wanted is not None:
        raise ConfigError(f"--lowering {wanted}: the torch backend has no plans", hint="use it with --backend tensorrt")
    if backend == "tensorrt-rtx" and wanted == "plugin":
        raise ConfigError(
            "--lowering plugin: TensorRT-RTX has no plugin layers",
            hint="leave --lowering out, or use --backend tensorrt on the GPU that will run the engine",
        )
    defaults: dict[Backend, Lowering | None] = {"torch": None, "tensorrt": "plugin", "tensorrt-rtx": "native"}
    lowering = wanted or defaults[backend]
    if plugin_library is not None and lowering != "plugin":
        raise ConfigError(
            f"--plugin-library {plugin_library}: only the plugin lowering uses it",
            hint="leave it out, or use --backend tensorrt --lowering plugin",
        )
    return lowering


def check_plan_options(
    backend: Backend, *, weights: WeightsMode, target_sm: Sequence[int], timing_cache: Path | None
) -> None:
    """Refuse what the backend would not use: whoever asks for it expects something else.

    Raises:
        ConfigError: an option of plans for torch, or a timing cache for TensorRT-RTX.
    """
    if backend == "torch":
        given = {
            "--weights embedded": weights == "embedded",
            "--target-sm": bool(target_sm),
            "--timing-cache": timing_cache is not None,
        }
        for option in (option for option, is_given in given.items() if is_given):
            raise ConfigError(
                f"{option}: the torch backend has no plans", hint="leave it out, or use --backend tensorrt"
            )
    if backend == "tensorrt-rtx" and timing_cache is not None:
        raise ConfigError(
            f"--timing-cache {timing_cache}: TensorRT-RTX chooses kernels when an engine is loaded and has none",
            hint="leave it out",
        )


def check_plugin_limits(source: Checkpoint) -> None:
    """See that the plugins were written for models like this one.

    Raises:
        BuildError: a dtype, head size or layer count that they do not have.
    """
    models: list[tuple[str, TargetConfig | DrafterConfig]] = [("target", source.target_config)]
    if source.drafter_config is not None:
        models.append(("drafter", source.drafter_config))
    for name, config in models:
        where = f"{source.path}: the {name}"
        if config.dtype not in _PLUGIN_DTYPES:
            raise BuildError(
                f"{where} has dtype {config.dtype}; the attention plugin computes {' or '.join(_PLUGIN_DTYPES)}",
                hint=f"convert with --dtype bfloat16, {_NATIVE_HINT}",
            )
        if config.head_dim not in _HEAD_DIMS:
            raise BuildError(
                f"{where} has head_dim {config.head_dim}; the attention plugin has {', '.join(map(str, _HEAD_DIMS))}",
                hint="use --lowering native, which has every head_dim",
            )
    drafter = source.drafter_config
    if drafter is None:
        return
    taps = 0 if drafter.conv is None else drafter.conv.kernel_size
    for found, most, what in (
        (drafter.num_layers, _MOST_INJECTED_LAYERS, "layers; the injection plugin writes"),
        (taps, _MOST_TAPS, "convolution taps; the convolution plugin has"),
    ):
        if found > most:
            raise BuildError(
                f"{source.path}: the drafter has {found} {what} at most {most}",
                hint="use --lowering native, which has no such limit",
            )


def choose_plugin_library(named: Path | None, target_sm: tuple[int, ...]) -> ChosenPluginLibrary:
    """The library of the plugin lowering, checked.

    Args:
        named: the file; None takes ``TRTLLM_DFLASH_PLUGIN_LIBRARY`` or the place where ``plugins build`` puts it.
        target_sm: compute capabilities that plans are built for.

    Raises:
        BuildError: it is missing, no plugin library, or lacks a plugin or the GPU.
    """
    path = find_library() if named is None else named
    if path is None or not path.is_file():
        looked = ", ".join(str(candidate) for candidate in ([path] if path is not None else candidate_paths()))
        raise BuildError(
            f"--lowering plugin needs the plugin library {LIBRARY_NAME}, which is not at {looked}",
            hint=f"compile it with: trtllm-dflash plugins build, or name it with --plugin-library or "
            f"{LIBRARY_VARIABLE}, {_NATIVE_HINT}",
        )
    try:
        info = load_library(path).info
    except EngineError as problem:
        raise BuildError(problem.message, hint=f"{problem.hint}, {_NATIVE_HINT}") from None
    missing = [name for name in PLUGIN_NAMES if name not in info.plugins]
    if missing:
        raise BuildError(
            f"{path}: has no TensorRT plugin {', '.join(missing)}; it holds {', '.join(info.plugins) or 'none'}",
            hint="compile it again with: trtllm-dflash plugins build",
        )
    for sm in target_sm:
        if not any(_runs_on(compiled, sm) for compiled in info.sm):
            raise BuildError(
                f"{path}: compiled for SM {', '.join(info.sm)}, and the plans are for SM {sm}",
                hint=f"compile it again with: trtllm-dflash plugins build --sm {sm}",
            )
    facts = PluginLibraryFacts(f"plugins/{LIBRARY_NAME}", hash_file(path).sha256, info.version, info.cuda, info.sm)
    return ChosenPluginLibrary(path.resolve(), facts)


def _runs_on(compiled: str, sm: int) -> bool:
    """Whether machine code for ``compiled`` runs on a GPU of capability ``sm`` (10 * major + minor).

    Plain code runs on later minors of its major version, ``f`` code likewise, ``a`` code on its own capability alone
    (CUDA's rules for architecture- and family-specific features).
    """
    parts = re.fullmatch(r"(\d+)([af]?)", compiled)
    if parts is None:
        return False
    built = int(parts[1])
    return built == sm or (parts[2] != "a" and built // 10 == sm // 10 and built <= sm)

"""``build``: a checkpoint directory becomes an engine directory, for torch or with TensorRT plans."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import trtllm_dflash
from trtllm_dflash.checkpoint.atomic_directory import atomic_directory, check_destination, directory_of_kind
from trtllm_dflash.checkpoint.manifest import hash_directory, manifest_to_json
from trtllm_dflash.checkpoint.read import Checkpoint, open_checkpoint, pairing_facts
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.typed_json import to_json
from trtllm_dflash.engine.directory import FORMAT_VERSION, KIND, Backend
from trtllm_dflash.engine.plan_build import BuildProgress, PlanOptions, build_plans
from trtllm_dflash.engine.plan_facts import Lowering, TensorRTFacts, WeightsMode
from trtllm_dflash.engine.plan_lowering import (
    check_plan_options,
    check_plugin_limits,
    choose_lowering,
    choose_plugin_library,
)
from trtllm_dflash.engine.tensorrt_compile import choose_target_sm
from trtllm_dflash.engine.tensorrt_emission import linear_row_tokens
from trtllm_dflash.errors import BuildError, ConfigError
from trtllm_dflash.ops.tensorrt_library import check_backend, load_tensorrt

DEFAULT_MAX_BATCH_SIZE = 16
DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_NUM_TOKENS = 2048
PAGE_TOKENS = 32


@dataclass(frozen=True)
class BuildReport:
    """What was built: seconds, bytes on disk and the limits; ``tensorrt`` and ``plan_bytes`` where there are plans."""

    output: Path
    backend: Backend
    limits: BuildLimits
    bytes: int
    elapsed_s: float
    tensorrt: TensorRTFacts | None = None
    plan_bytes: int = 0


def build(
    checkpoint: str | Path,
    output: str | Path,
    *,
    backend: str = "auto",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_num_tokens: int | None = None,
    block_size: int | None = None,
    lowering: Lowering | None = None,
    weights: WeightsMode = "external",
    target_sm: Sequence[int] = (),
    plugin_library: Path | None = None,
    timing_cache: Path | None = None,
    force: bool = False,
    progress: BuildProgress | None = None,
) -> BuildReport:
    """Build the engine directory ``output`` from a checkpoint directory.

    Args:
        checkpoint: directory written by ``convert``; it is verified first.
        backend: ``torch`` (the networks run by torch on any CPU or CUDA GPU; ``auto`` is this), ``tensorrt`` (plans for
            this machine's GPU) or ``tensorrt-rtx`` (plans for listed GPUs, built without one).
        max_batch_size: running requests (default 16). max_seq_len: prompt + output (default 4096, at most the
            target's and the drafter's trained length). max_num_tokens: prompt tokens of one step (default 2048).
        block_size: S, up to the checkpoint's (default: the checkpoint's).
        lowering: of the special operations in plans: ``plugin`` (layers of the plugin library over paged caches, full
            TensorRT, its default) or ``native`` (TensorRT's own layers over linear caches).
        weights: of plans: ``external`` leaves them in the rank files and binds them at load, ``embedded`` puts them
            into the plans.
        target_sm: compute capabilities of plans, 10 * major + minor; empty for the backend's default.
        plugin_library: of the plugin lowering; None takes ``TRTLLM_DFLASH_PLUGIN_LIBRARY`` or the package's own.
        timing_cache: file to read and update, for ``tensorrt``.
        force: replace an engine directory that is there. progress: told (phase, done, total) while plans are built.

    Raises:
        ConfigError: a limit is out of range. BuildError: the backend is not available, or TensorRT failed.
        CheckpointError: the checkpoint is damaged, or ``output`` may not be written.
    """
    started = time.perf_counter()
    chosen = choose_backend(backend)
    check_destination(Path(output), force=force, is_ours=directory_of_kind(KIND))
    source = open_checkpoint(checkpoint)
    chosen_lowering = choose_lowering(chosen, lowering, plugin_library)
    check_plan_options(chosen, weights=weights, target_sm=target_sm, timing_cache=timing_cache)
    limits = build_limits(source, chosen_lowering, max_batch_size, max_seq_len, max_num_tokens, block_size)
    plans = None
    if chosen_lowering is None:
        _check_torch_can(source)
    else:
        plans = plan_options(
            source,
            chosen,
            chosen_lowering,
            weights=weights,
            target_sm=target_sm,
            plugin_library=plugin_library,
            timing_cache=timing_cache,
        )
        plans = replace(plans, progress=progress)
    source.verify()
    with_weights = plans is None or plans.weights == "external"
    facts: TensorRTFacts | None = None
    with atomic_directory(Path(output), force=force, is_ours=directory_of_kind(KIND)) as directory:
        for model in ("target",) if source.drafter_config is None else ("target", "drafter"):
            _write_model(source, model, directory, limits, paged=chosen_lowering != "native", with_weights=with_weights)
        if plans is not None:
            facts = build_plans(source, directory, limits, plans)
        if source.tokenizer_dir is None:
            raise ConfigError(
                f"{source.path}: has no tokenizer, which generation needs",
                hint="convert from a directory that has tokenizer.json",
            )
        shutil.copytree(source.tokenizer_dir, directory / "tokenizer")
        records = hash_directory(
            directory, known={name: source.files[name] for name in _rank_files(source)} if with_weights else {}
        )
        _write_json(
            directory / "config.json",
            {
                "format_version": FORMAT_VERSION,
                "kind": KIND,
                "version": trtllm_dflash.__version__,
                "backend": chosen,
                "tensorrt": None if facts is None else to_json(facts),
                "pairing": None if source.drafter_config is None else pairing_facts(source.drafter_config),
                "limits": asdict(limits),
                "tp_size": source.mapping.tp_size,
                "tokenizer": "tokenizer",
                "source": dict(source.source),
                "files": manifest_to_json(records),
            },
        )
    total = sum(record.bytes for record in records.values())
    plan_bytes = sum(record.bytes for name, record in records.items() if name.endswith(".engine"))
    return BuildReport(Path(output), chosen, limits, total, time.perf_counter() - started, facts, plan_bytes)


def choose_backend(wanted: str) -> Backend:
    """``auto`` is torch. Raises ``ConfigError`` for an unknown name."""
    if wanted in ("auto", "torch"):
        return "torch"
    if wanted in ("tensorrt", "tensorrt-rtx"):
        return check_backend(wanted)
    raise ConfigError(f"backend {wanted!r}: expected auto, torch, tensorrt or tensorrt-rtx")


def _check_torch_can(source: Checkpoint) -> None:
    if source.mapping.tp_size != 1:
        raise BuildError(
            f"{source.path}: converted for {source.mapping.tp_size} ranks; the torch backend runs one",
            hint="convert with --tp-size 1",
        )


def plan_options(
    source: Checkpoint,
    backend: Backend,
    lowering: Lowering,
    *,
    weights: WeightsMode,
    target_sm: Sequence[int],
    plugin_library: Path | None,
    timing_cache: Path | None,
) -> PlanOptions:
    """Check what is asked of TensorRT before anything is written.

    Raises:
        BuildError: TensorRT or the plugin library is missing, of another version, or cannot do what the checkpoint
            asks for.
        ConfigError: a compute capability that it cannot build for, or unknown ``weights``.
    """
    if weights not in ("external", "embedded"):
        raise ConfigError(f"--weights {weights}: expected external or embedded")
    library = load_tensorrt(check_backend(backend))
    if source.quantization.kv_cache_dtype != "auto":
        raise BuildError(
            f"{source.path}: converted with --kv-cache-dtype {source.quantization.kv_cache_dtype}; caches of TensorRT "
            "engines have the compute dtype",
            hint="convert with --kv-cache-dtype auto, or build with --backend torch",
        )
    if lowering == "plugin":
        check_plugin_limits(source)
    device_sm = None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device_sm = 10 * major + minor
    sms = choose_target_sm(library, target_sm, device_sm=device_sm)
    return PlanOptions(
        backend=library.backend,
        version=library.version,
        lowering=lowering,
        weights=weights,
        target_sm=sms,
        plugin_library=choose_plugin_library(plugin_library, sms) if lowering == "plugin" else None,
        timing_cache=timing_cache,
    )


def build_limits(
    source: Checkpoint,
    lowering: Lowering | None,
    max_batch_size: int | None,
    max_seq_len: int | None,
    max_num_tokens: int | None,
    block_size: int | None,
) -> BuildLimits:
    """The limits of an engine, defaults filled in and checked against the models.

    Raises:
        ConfigError: a limit is out of range.
    """
    trained = source.target_config.max_position_embeddings
    if source.drafter_config is not None:
        trained = min(trained, source.drafter_config.max_position_embeddings)
    seq_len = min(DEFAULT_MAX_SEQ_LEN, trained) if max_seq_len is None else max_seq_len
    limits = BuildLimits(
        max_batch_size=_in_range("--max-batch-size", max_batch_size, DEFAULT_MAX_BATCH_SIZE, 1, 4096),
        max_seq_len=_in_range("--max-seq-len", seq_len, seq_len, 2, trained, "the models' trained length"),
        max_num_tokens=_in_range("--max-num-tokens", max_num_tokens, DEFAULT_MAX_NUM_TOKENS, 1, 1 << 20),
        block_size=_block_size(source.drafter_config, block_size),
        page_tokens=PAGE_TOKENS,
    )
    if lowering != "native":
        return limits
    # A linear cache is a paged cache whose page holds a whole sequence; the block's room at its end is nobody's page.
    return replace(limits, page_tokens=linear_row_tokens(limits) - limits.block_size)


def _block_size(drafter: DrafterConfig | None, wanted: int | None) -> int:
    if drafter is None:
        if wanted not in (None, 1):
            raise ConfigError(
                f"--block-size {wanted}: this checkpoint has no drafter, so only 1 is possible",
                hint="convert with --drafter",
            )
        return 1
    trained = drafter.block_size
    return _in_range("--block-size", wanted, trained, 2, trained, "the drafter's trained block size")


def _in_range(option: str, value: int | None, default: int, low: int, high: int, why: str = "") -> int:
    chosen = default if value is None else value
    if not low <= chosen <= high:
        bound = f" ({why})" if why else ""
        raise ConfigError(f"{option} {chosen}: expected {low} to {high}{bound}")
    return chosen


def _write_model(
    source: Checkpoint, model: str, directory: Path, limits: BuildLimits, *, paged: bool, with_weights: bool
) -> None:
    (directory / model).mkdir()
    pretrained = json.loads((source.path / model / "config.json").read_text(encoding="utf-8"))
    build_config = {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_seq_len - 1,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_draft_len": limits.block_size - 1,
        "kv_cache_type": "paged" if paged else "continuous",
        "tokens_per_block": limits.page_tokens,
        "speculative_decoding_mode": "dflash" if source.drafter_config is not None else None,
        "strongly_typed": True,
    }
    _write_json(directory / model / "config.json", {"pretrained_config": pretrained, "build_config": build_config})
    for name in _rank_files(source):
        if with_weights and name.startswith(f"{model}/"):
            _link_or_copy(source.path / name, directory / name)


def _rank_files(source: Checkpoint) -> list[str]:
    models = ("target",) if source.drafter_config is None else ("target", "drafter")
    return [f"{model}/rank{rank}.safetensors" for model in models for rank in range(source.mapping.tp_size)]


def _link_or_copy(source: Path, destination: Path) -> None:
    """Weights are shared with the checkpoint where the file system allows it: no second copy of many gigabytes."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

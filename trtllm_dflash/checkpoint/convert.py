"""Conversion: two checkpoints become one checkpoint directory in TensorRT-LLM's layout."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

import trtllm_dflash
from trtllm_dflash.checkpoint.atomic_directory import atomic_directory, check_destination, directory_of_kind
from trtllm_dflash.checkpoint.drafter_plan import REFUSED, plan_drafter, repeated_target_weights
from trtllm_dflash.checkpoint.host_memory import PeakMemory
from trtllm_dflash.checkpoint.manifest import FileRecord, hash_directory, manifest_to_json
from trtllm_dflash.checkpoint.progress import Progress, silent
from trtllm_dflash.checkpoint.read import FORMAT_VERSION, KIND, pairing_facts
from trtllm_dflash.checkpoint.safetensors_writer import SafetensorsWriter
from trtllm_dflash.checkpoint.sharding import check_tp_size
from trtllm_dflash.checkpoint.source_location import DEMO, SourceLocation, locate
from trtllm_dflash.checkpoint.target_plan import plan_target
from trtllm_dflash.checkpoint.tensor_plan import Plan
from trtllm_dflash.checkpoint.tensor_source import TensorSource, check_same_weights, open_tensor_source
from trtllm_dflash.checkpoint.tokenizer_files import copy_tokenizer
from trtllm_dflash.checkpoint.trtllm_config import write_drafter_config, write_target_config
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.config.dtypes import ComputeDtype
from trtllm_dflash.config.families import declared_dtype, family_named, parse_target_config
from trtllm_dflash.config.json_reader import read_json
from trtllm_dflash.config.mapping import KvCacheDtype, ParallelMapping, QuantAlgo, QuantizationConfig
from trtllm_dflash.config.pair_validation import validate_pair
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import CheckpointError, ConfigError

_TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SOURCE_DTYPES: dict[str, ComputeDtype] = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        output: the checkpoint directory.
        dtype: compute dtype of both models.
        tensors: tensors written, over all ranks of both models.
        bytes: size of all files written. seconds: wall time, downloads included.
        peak_host_mb: peak resident memory in MB (10^6 bytes).
        notes: adaptations and choices that should not pass unseen.
    """

    output: Path
    dtype: str
    tensors: int
    bytes: int
    seconds: float
    peak_host_mb: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Model:
    """One model of the pair, ready to be written."""

    name: Literal["target", "drafter"]
    plan: Plan
    source: TensorSource
    algo: QuantAlgo


def convert(
    target: str,
    drafter: str | None,
    output: Path,
    *,
    dtype: str = "auto",
    tp_size: int = 1,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a target and a drafter into a checkpoint directory.

    One tensor is in memory at a time. The output appears whole or not at all.

    Args:
        target, drafter: directory, hub id or ``demo``; drafter None converts the target alone.
        output: the directory to write.
        dtype: ``auto`` (the target's own; float32 for ``demo``), ``float32``, ``float16`` or ``bfloat16``; the
            drafter is converted to the same.
        tp_size: tensor-parallel ranks.
        quantization: ``none``, ``fp8``, ``int8`` or ``nvfp4``, for the target's linear layers.
        kv_cache_dtype: ``auto`` (compute dtype) or ``fp8``, for the target's cache; ``fp8`` is what the torch backend
            keeps on a GPU with the plugin kernels, TensorRT builds refuse it.
        force: replace an existing checkpoint directory.
        progress: called while downloading and writing.

    Raises:
        ConfigError: options or configuration files that are wrong or unsupported, a pair that does not fit.
        CheckpointError: tensors that are missing, unexpected or damaged; an output that may not be overwritten.
    """
    started, memory, report_progress = time.monotonic(), PeakMemory(), progress or silent
    algo, kv_dtype = _check_options(dtype, tp_size, quantization, kv_cache_dtype)
    check_destination(output, force=force, is_ours=directory_of_kind(KIND))
    target_at = locate(target, "target", report_progress)
    # Configuration before tensors: "target and drafter are swapped" explains more than the name of a tensor.
    target_config = parse_target_config(target_at.directory, dtype=None if dtype == "auto" else dtype)
    target_source = open_tensor_source(target_at.directory)
    compute_dtype, notes = _compute_dtype(dtype, target_at, target_config, target_source)
    target_config = replace(target_config, dtype=compute_dtype)
    mapping = ParallelMapping(tp_size)
    models = [_Model("target", plan_target(target_config, tp_size), target_source, algo)]
    drafter_config, drafter_at = None, None
    if drafter is not None:
        drafter_at = locate(drafter, "drafter", report_progress)
        parsed = parse_drafter_config(drafter_at.directory, dtype=compute_dtype)
        drafter_source = open_tensor_source(drafter_at.directory)
        notes += validate_pair(target_config, parsed)
        drafter_config = replace(parsed, vocab_size=target_config.vocab_size)
        plan = plan_drafter(drafter_config, set(drafter_source.tensors), source_vocab_size=parsed.vocab_size)
        models.append(_Model("drafter", plan, drafter_source, "none"))
    _check_tp(target_config, drafter_config, tp_size)
    _check_plans(models, drafter_config, target_config)
    notes += _padding_notes(target_config, target_source)
    with atomic_directory(output, force=force, is_ours=directory_of_kind(KIND)) as directory:
        records, tensors = _write_models(directory, models, _TORCH_DTYPES[compute_dtype], tp_size, report_progress)
        write_target_config(
            directory / "target" / "config.json", target_config, mapping, QuantizationConfig(algo, kv_dtype)
        )
        if drafter_config is not None:
            write_drafter_config(directory / "drafter" / "config.json", drafter_config, mapping)
        if not copy_tokenizer(target_at.directory, directory / "tokenizer"):
            notes += (f"{target}: has no tokenizer; the engine will take and give token ids only",)
        records = hash_directory(directory, known=records)
        sources = {"target": target_at.facts(), "drafter": drafter_at.facts() if drafter_at is not None else None}
        _write_root_config(directory, drafter_config, sources, records)
        written = sum(record.bytes for record in records.values())
    return ConvertReport(
        output, compute_dtype, tensors, written, time.monotonic() - started, memory.peak_mb(), tuple(notes)
    )


def _check_options(dtype: str, tp_size: int, quantization: str, kv_cache_dtype: str) -> tuple[QuantAlgo, KvCacheDtype]:
    for option, value, allowed in (
        ("--dtype", dtype, ("auto", *_TORCH_DTYPES)),
        ("--quantization", quantization, get_args(QuantAlgo)),
        ("--kv-cache-dtype", kv_cache_dtype, get_args(KvCacheDtype)),
    ):
        if value not in allowed:
            raise ConfigError(f"{option}: found {value!r}, expected one of {', '.join(allowed)}")
    if tp_size < 1:
        raise ConfigError(f"--tp-size: found {tp_size}, expected an integer >= 1")
    algo = next(known for known in get_args(QuantAlgo) if known == quantization)
    return algo, next(known for known in get_args(KvCacheDtype) if known == kv_cache_dtype)


def _compute_dtype(
    dtype: str, at: SourceLocation, config: TargetConfig, source: TensorSource
) -> tuple[str, tuple[str, ...]]:
    if dtype != "auto":
        return dtype, ()
    if at.name == DEMO:
        note = "dtype auto of the demo target is float32: in bfloat16 its two best tokens tie in 1.3 % of greedy steps"
        return "float32", (note,)
    declared = declared_dtype(read_json(at.directory / "config.json"))
    if declared is not None:
        return declared, ()
    embedding = family_named(config.family).tensor_names.embedding
    stored = source.tensors.get(embedding)
    if stored is None or stored.dtype not in _SOURCE_DTYPES:
        raise CheckpointError(
            f"{at.directory}: config.json names no dtype and tensor '{embedding}' does not tell one",
            hint="pass --dtype",
        )
    return _SOURCE_DTYPES[stored.dtype], ()


def _check_tp(target: TargetConfig, drafter: DrafterConfig | None, tp_size: int) -> None:
    for name, config in (("target", target), ("drafter", drafter)):
        if config is not None:
            check_tp_size(
                name,
                tp_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                intermediate_size=config.intermediate_size,
            )


def _check_plans(models: list[_Model], drafter: DrafterConfig | None, target: TargetConfig) -> None:
    for model in models:
        model.plan.check(model.source, refused=REFUSED if model.name == "drafter" else None)
    if drafter is None:
        return
    target_source, drafter_source = models[0].source, models[1].source
    names = family_named(target.family).tensor_names
    theirs = (names.embedding, names.embedding if target.tie_word_embeddings else names.head)
    for repeated, original in zip(repeated_target_weights(drafter), theirs, strict=False):
        if repeated in drafter_source.tensors:
            check_same_weights(drafter_source, repeated, target_source, original, rows=target.vocab_size)
    if drafter.draft_vocab_size is not None:
        _check_reduced_vocabulary(drafter_source, drafter.draft_vocab_size, target.vocab_size)


def _padding_notes(config: TargetConfig, source: TensorSource) -> tuple[str, ...]:
    names = family_named(config.family).tensor_names
    tables = (names.embedding,) if config.tie_word_embeddings else (names.embedding, names.head)
    extra = {name: source.tensors[name].shape[0] - config.vocab_size for name in tables}
    return tuple(f"{name}: {count} rows beyond vocab_size left out" for name, count in extra.items() if count > 0)


def _check_reduced_vocabulary(source: TensorSource, draft_vocab_size: int, vocab_size: int) -> None:
    target_ids = source.read_integers("d2t") + torch.arange(draft_vocab_size)
    wrong = target_ids[(target_ids < 0) | (target_ids >= vocab_size)]
    if len(wrong):
        raise CheckpointError(
            f"{source.tensors['d2t'].file}: tensor 'd2t': maps a drafted id to {int(wrong[0])}, expected ids in "
            f"[0, {vocab_size - 1}] (d2t holds offsets: target id = drafted id + d2t[drafted id])"
        )
    if len(set(target_ids.tolist())) != draft_vocab_size:
        raise CheckpointError(f"{source.tensors['d2t'].file}: tensor 'd2t': maps two drafted ids to one target id")


def _write_models(
    directory: Path, models: list[_Model], dtype: torch.dtype, tp_size: int, progress: Progress
) -> tuple[dict[str, FileRecord], int]:
    """Write every rank file of every model, tensor by tensor; returns the records and the number of tensors."""
    records: dict[str, FileRecord] = {}
    _check_disk_space(directory, models, dtype, tp_size)
    sizes = [spec.bytes for model in models for tensor in model.plan.tensors for spec in tensor.specs(dtype, "none", 1)]
    done, total, count = 0, sum(sizes), 0
    for model in models:
        (directory / model.name).mkdir()
        names = [f"{model.name}/rank{rank}.safetensors" for rank in range(tp_size)]
        specs = [spec for tensor in model.plan.tensors for spec in tensor.specs(dtype, model.algo, tp_size)]
        writers = [SafetensorsWriter(directory / name, specs) for name in names]
        try:
            for tensor in model.plan.tensors:
                for name, whole in tensor.load(model.source, dtype, model.algo).items():
                    for rank, writer in enumerate(writers):
                        writer.write(name, tensor.rule.shard(whole, rank, tp_size))
                done += sum(spec.bytes for spec in tensor.specs(dtype, "none", 1))
                progress(f"converting the {model.name}", done, total)
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        hashed, to_hash = 0, sum(writer.file_bytes for writer in writers)
        for name, writer in zip(names, writers, strict=True):
            records[name] = writer.close(partial(_report_hashing, progress, model.name, hashed, to_hash))
            hashed += writer.file_bytes
        count += len(specs) * tp_size
    return records, count


def _check_disk_space(directory: Path, models: list[_Model], dtype: torch.dtype, tp_size: int) -> None:
    specs = (
        spec for model in models for tensor in model.plan.tensors for spec in tensor.specs(dtype, model.algo, tp_size)
    )
    needed, free = sum(spec.bytes for spec in specs) * tp_size, shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"{directory.parent}: {free / 1e6:.0f} MB are free, the checkpoint needs {needed / 1e6:.0f} MB",
            hint="free disk space or choose another output directory (the old one is kept until the new one is whole)",
        )


def _report_hashing(progress: Progress, model: str, before: int, total: int, done: int) -> None:
    progress(f"hashing the {model}", before + done, total)


def _write_root_config(
    directory: Path, drafter: DrafterConfig | None, sources: Mapping[str, object], records: dict[str, FileRecord]
) -> None:
    root = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "toolkit_version": trtllm_dflash.__version__,
        "pairing": pairing_facts(drafter) if drafter is not None else None,
        "source": sources,
        "files": manifest_to_json(records),
    }
    (directory / "config.json").write_text(json.dumps(root, indent=2) + "\n", encoding="utf-8")

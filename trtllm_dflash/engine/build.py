"""``build`` for the torch backend: a checkpoint directory becomes an engine directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import trtllm_dflash
from trtllm_dflash.checkpoint.atomic_directory import atomic_directory
from trtllm_dflash.checkpoint.manifest import hash_directory, manifest_to_json
from trtllm_dflash.checkpoint.read import Checkpoint, open_checkpoint, pairing_facts
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.directory import FORMAT_VERSION, KIND, Backend
from trtllm_dflash.errors import BuildError, ConfigError

DEFAULT_MAX_BATCH_SIZE = 16
DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_NUM_TOKENS = 2048
PAGE_TOKENS = 32


@dataclass(frozen=True)
class BuildReport:
    """What was built: seconds, bytes on disk and the limits."""

    output: Path
    backend: Backend
    limits: BuildLimits
    bytes: int
    elapsed_s: float


def build(
    checkpoint: str | Path,
    output: str | Path,
    *,
    backend: str = "auto",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_num_tokens: int | None = None,
    block_size: int | None = None,
    force: bool = False,
) -> BuildReport:
    """Build the engine directory ``output`` from a checkpoint directory.

    Args:
        checkpoint: directory written by ``convert``; it is verified first.
        backend: ``auto`` or ``torch`` (the networks run by torch on any CPU or CUDA GPU).
        max_batch_size: running requests (default 16). max_seq_len: prompt + output (default 4096, at most the
            target's and the drafter's trained length). max_num_tokens: prompt tokens of one pass (default 2048).
        block_size: S, up to the checkpoint's (default: the checkpoint's).
        force: replace an engine directory that is there.

    Raises:
        ConfigError: a limit is out of range. BuildError: the backend is not available.
        CheckpointError: the checkpoint is damaged, or ``output`` may not be written.
    """
    started = time.perf_counter()
    chosen = _backend(backend)
    source = open_checkpoint(checkpoint)
    limits = _limits(source, max_batch_size, max_seq_len, max_num_tokens, block_size)
    if source.mapping.tp_size != 1:
        raise BuildError(
            f"{source.path}: converted for {source.mapping.tp_size} ranks; the torch backend runs one",
            hint="convert with --tp-size 1",
        )
    if source.quantization.kv_cache_dtype == "fp8":
        raise BuildError(
            f"{source.path}: converted with --kv-cache-dtype fp8, which the torch backend does not have",
            hint="convert with --kv-cache-dtype auto",
        )
    source.verify()
    with atomic_directory(Path(output), force=force) as directory:
        _write_model(source, "target", directory, limits)
        if source.drafter_config is not None:
            _write_model(source, "drafter", directory, limits)
        if source.tokenizer_dir is None:
            raise ConfigError(
                f"{source.path}: has no tokenizer, which generation needs",
                hint="convert from a directory that has tokenizer.json",
            )
        shutil.copytree(source.tokenizer_dir, directory / "tokenizer")
        records = hash_directory(
            directory, known={name: record for name, record in source.files.items() if name.endswith(".safetensors")}
        )
        _write_json(
            directory / "config.json",
            {
                "format_version": FORMAT_VERSION,
                "kind": KIND,
                "version": trtllm_dflash.__version__,
                "backend": chosen,
                "pairing": None if source.drafter_config is None else pairing_facts(source.drafter_config),
                "limits": asdict(limits),
                "tp_size": source.mapping.tp_size,
                "tokenizer": "tokenizer",
                "source": dict(source.source),
                "files": manifest_to_json(records),
            },
        )
    total = sum(record.bytes for record in records.values())
    return BuildReport(Path(output), chosen, limits, total, time.perf_counter() - started)


def _backend(wanted: str) -> Backend:
    if wanted in ("auto", "torch"):
        return "torch"
    if wanted in ("tensorrt", "tensorrt-rtx"):
        raise BuildError(
            f"backend {wanted}: not available in this version", hint="use --backend torch, which runs everywhere"
        )
    raise ConfigError(f"backend {wanted!r}: expected auto, torch, tensorrt or tensorrt-rtx")


def _limits(
    source: Checkpoint,
    max_batch_size: int | None,
    max_seq_len: int | None,
    max_num_tokens: int | None,
    block_size: int | None,
) -> BuildLimits:
    trained = source.target_config.max_position_embeddings
    if source.drafter_config is not None:
        trained = min(trained, source.drafter_config.max_position_embeddings)
    seq_len = min(DEFAULT_MAX_SEQ_LEN, trained) if max_seq_len is None else max_seq_len
    return BuildLimits(
        max_batch_size=_in_range("--max-batch-size", max_batch_size, DEFAULT_MAX_BATCH_SIZE, 1, 4096),
        max_seq_len=_in_range("--max-seq-len", seq_len, seq_len, 2, trained, "the models' trained length"),
        max_num_tokens=_in_range("--max-num-tokens", max_num_tokens, DEFAULT_MAX_NUM_TOKENS, 1, 1 << 20),
        block_size=_block_size(source.drafter_config, block_size),
        page_tokens=PAGE_TOKENS,
    )


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


def _write_model(source: Checkpoint, model: str, directory: Path, limits: BuildLimits) -> None:
    (directory / model).mkdir()
    pretrained = json.loads((source.path / model / "config.json").read_text(encoding="utf-8"))
    build_config = {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_seq_len - 1,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_draft_len": limits.block_size - 1,
        "kv_cache_type": "paged",
        "tokens_per_block": limits.page_tokens,
        "speculative_decoding_mode": "dflash" if source.drafter_config is not None else None,
        "strongly_typed": True,
    }
    _write_json(directory / model / "config.json", {"pretrained_config": pretrained, "build_config": build_config})
    for rank in range(source.mapping.tp_size):
        name = f"{model}/rank{rank}.safetensors"
        _link_or_copy(source.path / name, directory / name)


def _link_or_copy(source: Path, destination: Path) -> None:
    """Weights are shared with the checkpoint where the file system allows it: no second copy of many gigabytes."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

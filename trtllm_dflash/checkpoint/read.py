"""Reading a checkpoint directory back: configuration, tensors of one rank, and verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from trtllm_dflash.checkpoint.directory_kind import directory_kind
from trtllm_dflash.checkpoint.manifest import FileRecord, check_sizes, manifest_from_json, verify_directory
from trtllm_dflash.checkpoint.trtllm_config import read_drafter_config, read_target_config
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.mapping import ParallelMapping, QuantizationConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import CheckpointError, ConfigError

FORMAT_VERSION = 1
KIND = "checkpoint"

Model = Literal["target", "drafter"]


class RankTensors(Mapping[str, torch.Tensor]):
    """The tensors of one rank file; each access maps the tensor's pages and reads nothing else.

    Args:
        file: a safetensors file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._opened: Any
        try:
            self._opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{file}: cannot be read: {problem}", hint="convert again with --force") from None
        self._names: frozenset[str] = frozenset(self._opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._opened.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint directory.

    Attributes:
        path: the directory.
        target_config, drafter_config: the models; no drafter is None.
        mapping: tensor-parallel mapping of the rank files.
        quantization: of the target's linears and of the cache.
        source: names and revisions of what was converted, as config.json has them.
        files: size and SHA-256 of every file.
    """

    path: Path
    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    mapping: ParallelMapping
    quantization: QuantizationConfig
    source: Mapping[str, object]
    files: Mapping[str, FileRecord]

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of the tokenizer's files, or None when the source had no tokenizer."""
        directory = self.path / "tokenizer"
        return directory if directory.is_dir() else None

    def tensors(self, which: Model, rank: int = 0) -> RankTensors:
        """The tensors of one model on one rank, read lazily.

        Raises:
            CheckpointError: no drafter, no such rank, or a damaged file.
        """
        if which == "drafter" and self.drafter_config is None:
            raise CheckpointError(f"{self.path}: has no drafter", hint="convert with --drafter")
        if not 0 <= rank < self.mapping.tp_size:
            raise CheckpointError(f"{self.path}: has ranks 0 to {self.mapping.tp_size - 1}, asked for rank {rank}")
        return RankTensors(self.path / which / f"rank{rank}.safetensors")

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check size and SHA-256 of every file.

        Args:
            progress: called with (bytes done, bytes in all).

        Raises:
            CheckpointError: naming the file that is missing, truncated or changed.
        """
        verify_directory(self.path, self.files, progress)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint directory that ``convert`` wrote. File sizes are checked, contents by ``verify()``.

    Raises:
        ConfigError: not a checkpoint directory, another format version, or a damaged config.json.
        CheckpointError: a file is missing or has another size.
    """
    directory = Path(path)
    root = read_json(_root_config(directory))
    if directory_kind(root) != KIND:
        raise root.error("kind", f'"{KIND}"', hint="give the directory that convert wrote")
    if root.integer("format_version") != FORMAT_VERSION:
        raise root.error("format_version", str(FORMAT_VERSION), hint="convert again with this version of the toolkit")
    files = manifest_from_json(root.child("files"))
    check_sizes(directory, files)
    target_config, mapping, quantization = read_target_config(directory / "target" / "config.json")
    drafter_config = None
    if root.has("pairing"):
        drafter_config = read_drafter_config(directory / "drafter" / "config.json")
        _check_pairing(root.child("pairing"), drafter_config)
    return Checkpoint(directory, target_config, drafter_config, mapping, quantization, root.child("source").data, files)


def pairing_facts(config: DrafterConfig) -> dict[str, object]:
    """The ``pairing`` object of config.json: what the engine and the runtime must know of the drafter."""
    return {
        "version": config.version,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_drafter_layers": config.num_layers,
    }


def _check_pairing(pairing: JsonObject, config: DrafterConfig) -> None:
    for key, value in pairing_facts(config).items():
        if pairing.data.get(key) != value:
            raise pairing.error(key, f"{value}, as in drafter/config.json")


def _root_config(directory: Path) -> Path:
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory", hint="make one with trtllm-dflash convert")
    if not file.is_file():
        raise ConfigError(
            f"{directory}: has no config.json, so it is not a checkpoint directory",
            hint="make one with trtllm-dflash convert",
        )
    return file

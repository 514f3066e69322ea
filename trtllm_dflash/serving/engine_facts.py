"""What serving must know of an engine directory before loading it; reads configuration only, no weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_dflash.checkpoint.manifest import check_sizes
from trtllm_dflash.config.drafter import DrafterLayerAttention
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.directory import EngineDirectory, open_engine_directory, refuse_several_ranks
from trtllm_dflash.errors import EngineError

_DRAFTER_RUNS = ("block_size", "captured_layers", "windows", "proposals", "head")


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine directory.

    Attributes:
        backend: what runs it. limits: what it was built for; after :meth:`with_choices` its slots are those in use.
        vocab_size, eos_token_ids: the target's. has_drafter: whether it can speculate.
        runs: what will run, as labels: backend, drafter version, block size, captured layers, windows, limits.
        config_sha256: of config.json, hexadecimal; it holds every other file's hash, so it identifies the directory.
    """

    backend: str
    limits: BuildLimits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_drafter: bool
    runs: dict[str, str]
    config_sha256: str

    def with_choices(self, *, block_size: int, max_running: int | None) -> EngineFacts:
        """The facts with what the operator chose instead of the engine's own: S (1 is plain) and slots."""
        runs = dict(self.runs)
        if self.has_drafter and block_size == 1:
            runs = {name: value for name, value in runs.items() if name not in _DRAFTER_RUNS} | {"speculation": "off"}
        elif self.has_drafter:
            runs["block_size"] = f"{block_size} of {runs['block_size'].split()[-1]}"
        if max_running is not None:
            runs["max_running"] = str(max_running)
        # Who asks how many requests fit must hear of the slots that are used, not of those that were built.
        slots = min(self.limits.max_batch_size, max_running or self.limits.max_batch_size)
        return replace(self, runs=runs, limits=replace(self.limits, max_batch_size=slots))

    def startup_line(self) -> str:
        """One line that says what will run, so that nothing falls back silently."""
        return "runs " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.runs.items())


def read_engine_facts(engines: Path) -> EngineFacts:
    """Read the facts of the engine directory ``engines``; file sizes are checked, hashes are left to the load.

    Raises:
        ConfigError: not an engine directory, or a key is missing; names file and key. Or it is for several ranks.
        CheckpointError: a file is missing or truncated, by name.
    """
    directory = open_engine_directory(engines, verify=False)
    check_sizes(engines, directory.files)
    refuse_several_ranks(directory)
    return EngineFacts(
        backend=directory.backend,
        limits=directory.limits,
        vocab_size=directory.target_config.vocab_size,
        eos_token_ids=directory.target_config.eos_token_ids,
        has_drafter=directory.drafter_config is not None,
        runs=_runs(directory),
        config_sha256=config_fingerprint(engines),
    )


def _runs(directory: EngineDirectory) -> dict[str, str]:
    drafter, limits = directory.drafter_config, directory.limits
    runs = {"speculation": "off (no drafter)"}
    if drafter is not None:
        runs = {
            "speculation": f"DFlash {drafter.version}",
            "block_size": f"{limits.block_size} of {drafter.block_size}",
            "captured_layers": " ".join(map(str, drafter.target_layer_ids)),
            "windows": " ".join(_window(layer) for layer in drafter.layers),
            "proposals": "selector walk" if drafter.version == 2 else "per position",
            "head": "own reduced vocabulary" if drafter.draft_vocab_size else "shared",
        }
    return {
        "target": directory.target_config.architecture,
        **runs,
        "backend": directory.backend,
        "dtype": directory.target_config.dtype,
        "max_batch_size": str(limits.max_batch_size),
        "max_seq_len": str(limits.max_seq_len),
        "max_num_tokens": str(limits.max_num_tokens),
    }


def _window(layer: DrafterLayerAttention) -> str:
    """A drafter layer's visibility in one word: ``full``, ``2048``, ``2048-causal``."""
    reach = "full" if layer.window is None else str(layer.window)
    return f"{reach}-causal" if layer.causal else reach


def config_fingerprint(engines: Path) -> str:
    """SHA-256 of the directory's config.json, hexadecimal."""
    return hashlib.sha256((engines / "config.json").read_bytes()).hexdigest()


def check_fingerprint(engines: Path, expected: str) -> None:
    """Refuse an engine directory whose config.json is not the one that ``deploy`` saw.

    Args:
        engines: engine directory. expected: SHA-256 of its config.json, hexadecimal.
    """
    found = config_fingerprint(engines)
    if found != expected:
        raise EngineError(
            f"{engines / 'config.json'}: SHA-256 is {found[:12]}…, expected {expected[:12]}… as recorded by deploy",
            hint="the engine was rebuilt after deploy: run `trtllm-dflash deploy` again",
        )

"""What serving must know of an engine directory before loading it; reads configuration only, no weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.manifest import check_sizes
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.directory import open_engine_directory
from trtllm_dflash.errors import EngineError


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine directory.

    Attributes:
        backend: what runs it. limits: what it was built for.
        vocab_size, eos_token_ids: the target's. has_drafter: whether it can speculate.
        config_sha256: of config.json, hexadecimal; it holds every other file's hash, so it identifies the directory.
    """

    backend: str
    limits: BuildLimits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_drafter: bool
    config_sha256: str


def read_engine_facts(engines: Path) -> EngineFacts:
    """Read the facts of the engine directory ``engines``; file sizes are checked, hashes are left to the load.

    Raises:
        ConfigError: not an engine directory, or a key is missing; names file and key.
        CheckpointError: a file is missing or truncated, by name.
    """
    directory = open_engine_directory(engines, verify=False)
    check_sizes(engines, directory.files)
    return EngineFacts(
        backend=directory.backend,
        limits=directory.limits,
        vocab_size=directory.target_config.vocab_size,
        eos_token_ids=directory.target_config.eos_token_ids,
        has_drafter=directory.drafter_config is not None,
        config_sha256=config_fingerprint(engines),
    )


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

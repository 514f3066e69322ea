"""The configurations of a sweep: from a YAML file, or from shorthands over engine directories."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.engine.directory import EngineDirectory, open_engine_directory
from trtllm_dflash.errors import ConfigError

SHORTHANDS = "plain, auto, dflash, dflash2, S=N, dflash:S=N, dflash2:S=N"


def configurations_from_yaml(path: Path) -> list[Configuration]:
    """Read ``configurations``, a list of mappings whose keys are ``Configuration``'s fields.

    Relative paths are relative to the file. ``speculation`` may be on, off, auto, true or false.

    Raises:
        ConfigError: by file and place.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    listed = document.get("configurations") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: expected a list 'configurations' with at least one entry")
    found = [_from_mapping(entry, path, f"configurations[{number}]") for number, entry in enumerate(listed)]
    return check_labels(found)


def configurations_from_shorthands(words: Sequence[str], engines: Sequence[Path]) -> list[Configuration]:
    """The configurations that shorthands name.

    Args:
        words: ``plain`` (the first engine without speculation), ``auto`` (as ``LLM`` decides), ``dflash`` and
            ``dflash2`` (the engine whose drafter is of that version), ``S=N`` (the first engine with a drafter, at
            block size N); ``dflash:S=N`` and ``dflash2:S=N`` combine.
        engines: engine directories.

    Raises:
        ConfigError: an unknown word, or no engine for it.
    """
    if not engines:
        raise ConfigError("no engine directory for --configs", hint="give --engines, once for each engine directory")
    opened = [(path, open_engine_directory(path, verify=False)) for path in engines]
    return check_labels([_from_word(word.strip(), opened) for word in words if word.strip()])


def check_labels(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Refuse an empty list, and two configurations of one label."""
    labels = [configuration.label for configuration in configurations]
    if not labels:
        raise ConfigError("no configurations", hint=f"give --configs with some of: {SHORTHANDS}")
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two configurations are called {label!r}, expected different labels")
    return list(configurations)


def fingerprint(configuration: Configuration) -> str:
    """What a configuration is, for telling whether old points are still its own: its settings and its engine's hashes.

    Where the engine directory lies does not matter, what is in it does.
    """
    facts: dict[str, object] = {
        field.name: getattr(configuration, field.name)
        for field in dataclasses.fields(configuration)
        if field.name not in ("label", "engines", "tokenizer", "aiperf_command")
    }
    if configuration.engines is not None:
        facts["engine"] = hashlib.sha256((configuration.engines / "config.json").read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _from_word(word: str, engines: Sequence[tuple[Path, EngineDirectory]]) -> Configuration:
    if word == "plain":
        return Configuration("plain", engines=engines[0][0], speculation="off")
    if word == "auto":
        return Configuration("auto", engines=_with_drafter(engines, None, word), speculation="auto")
    name, _, size = word.rpartition(":") if "S=" in word else (word, "", "")
    version = {"": None, "dflash": 1, "dflash1": 1, "dflash2": 2}.get(name, 0)
    if version == 0 or (size and not (size.startswith("S=") and size[2:].isdecimal())):
        raise ConfigError(f"configuration {word!r}: expected some of {SHORTHANDS}")
    block_size = int(size[2:]) if size else None
    path = _with_drafter(engines, version, word)
    label = " ".join(part for part in ({1: "DFlash", 2: "DFlash 2", None: ""}[version], size) if part)
    return Configuration(label, engines=path, speculation="on", block_size=block_size)


def _with_drafter(engines: Sequence[tuple[Path, EngineDirectory]], version: int | None, word: str) -> Path:
    for path, directory in engines:
        if directory.drafter_config is not None and version in (None, directory.drafter_config.version):
            return path
    wanted = "a drafter" if version is None else f"a DFlash {version} drafter"
    raise ConfigError(
        f"configuration {word!r}: none of {', '.join(str(path) for path, _ in engines)} has {wanted}",
        hint="give that engine directory with another --engines",
    )


def _from_mapping(entry: object, path: Path, place: str) -> Configuration:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: {place} is {type(entry).__name__}, expected a mapping")
    known = {field.name for field in dataclasses.fields(Configuration)}
    for key in entry:
        if key not in known:
            raise ConfigError(f"{path}: {place} has a key {key!r}, expected some of {', '.join(sorted(known))}")
    values: dict[str, Any] = dict(entry)
    if not isinstance(values.get("label"), str):
        raise ConfigError(f"{path}: {place} has no label, expected a text")
    speculation = values.get("speculation", "auto")
    # YAML 1.1 reads a bare on or off as a truth value.
    values["speculation"] = {True: "on", False: "off"}[speculation] if isinstance(speculation, bool) else speculation
    if values["speculation"] not in ("auto", "on", "off"):
        raise ConfigError(f"{path}: {place}.speculation is {speculation!r}, expected on, off or auto")
    if not isinstance(values.get("prefix_cache", False), bool):
        raise ConfigError(f"{path}: {place}.prefix_cache is {values['prefix_cache']!r}, expected true or false")
    if values.get("api") not in (None, "triton", "openai"):
        raise ConfigError(f"{path}: {place}.api is {values['api']!r}, expected triton or openai")
    for key in ("url", "model", "aiperf_command"):
        if not isinstance(values.get(key, ""), str):
            raise ConfigError(f"{path}: {place}.{key} is {values[key]!r}, expected a text")
    for key in ("engines", "tokenizer"):
        if values.get(key) is not None:
            values[key] = path.parent / str(values[key])
    for key in ("block_size", "kv_cache_tokens", "gpus"):
        number = values.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"{path}: {place}.{key} is {number!r}, expected a whole number of at least 1")
    return Configuration(**values)

"""``deploy``: from an engine directory to a Triton model repository."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import trtllm_dflash
from trtllm_dflash.checkpoint.atomic_directory import atomic_directory
from trtllm_dflash.checkpoint.manifest import (
    hash_directory,
    manifest_from_json,
    manifest_to_json,
    verify_directory,
)
from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.errors import ConfigError
from trtllm_dflash.serving import metric_definitions, wire
from trtllm_dflash.serving.deploy_choices import check_choices
from trtllm_dflash.serving.engine_facts import EngineFacts, check_fingerprint, read_engine_facts
from trtllm_dflash.serving.request_inputs import INPUTS

FORMAT_VERSION = 1
IDENTITY = "repository.json"
DEFAULT_MAX_QUEUE = 256
_TEMPLATES = Path("share", "trtllm-dflash", "triton_server_repo")
_KIND = "model_repository"
_TEMPLATE = "dflash"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PLACEHOLDER = re.compile(r"@@(\w+)@@")


@dataclass(frozen=True)
class DeployReport:
    """What ``deploy`` wrote.

    Attributes:
        repository: the model repository. model_name: its one model. engines: the engine directory it refers to.
        facts: what the engine directory says of itself, with what was chosen here. max_queue: waiting requests at most.
        files: the files written, relative to ``repository``.
    """

    repository: Path
    model_name: str
    engines: Path
    facts: EngineFacts
    max_queue: int
    files: tuple[str, ...]


def deploy(
    engines: Path,
    output: Path,
    *,
    model_name: str = "dflash",
    max_queue: int = DEFAULT_MAX_QUEUE,
    device: str | None = None,
    prefix_cache: bool = True,
    speculation: SpeculationMode = "auto",
    block_size: int | None = None,
    max_running: int | None = None,
    kv_cache_tokens: int | None = None,
    force: bool = False,
) -> DeployReport:
    """Write a model repository that serves ``engines``.

    The engine directory is referred to by its absolute path and by the SHA-256 of its config.json, which the engine
    process checks when it loads: a rebuilt engine needs a new ``deploy``.

    Args:
        engines: engine directory, from ``build``. output: the repository to write, atomically.
        model_name: Triton's name of the model. max_queue: requests that may wait; one more is refused.
        device, prefix_cache, speculation, block_size, max_running, kv_cache_tokens: as ``LLM``'s; None leaves the
            choice to the engine.
        force: replace an existing repository.

    Raises:
        ConfigError: ``engines`` is not an engine directory, or an argument is out of range.
        CheckpointError: ``output`` exists and is not empty (without ``force``), or is not ours.
    """
    if not _MODEL_NAME.fullmatch(model_name):
        raise ConfigError(
            f"model name is {model_name!r}, expected 1 to 64 letters, digits, '_', '-' or '.', a letter or digit first"
        )
    if max_queue < 1:
        raise ConfigError(f"max queue is {max_queue}, expected at least 1")
    engines = engines.resolve()
    facts = read_engine_facts(engines)
    check_choices(
        engines.name,
        facts.limits,
        has_drafter=facts.has_drafter,
        speculation=speculation,
        block_size=block_size,
        max_running=max_running,
        kv_cache_tokens=kv_cache_tokens,
    )
    plain = speculation == "off" or not facts.has_drafter
    size = 1 if plain else block_size or facts.limits.block_size
    facts = facts.with_choices(block_size=size, max_running=max_running)
    command = [sys.executable, "-m", "trtllm_dflash.serving.engine_process", "--engines", str(engines)]
    command += ["--config-sha256", facts.config_sha256]
    command += ["--max-queue", str(max_queue)]
    if not prefix_cache:
        command += ["--no-prefix-cache"]
    if speculation != "auto":
        command += ["--speculation", speculation]
    for option, limit in (
        ("--block-size", block_size),
        ("--max-running", max_running),
        ("--kv-cache-tokens", kv_cache_tokens),
    ):
        if limit is not None:
            command += [option, str(limit)]
    if device:
        command += ["--device", device]
    values = {
        "model_name": model_name,
        "inputs": _inputs(),
        "engine_command": _quoted(json.dumps(command)),
        "engine_dir": _quoted(str(engines)),
        "engine_config_sha256": facts.config_sha256,
        "max_queue": str(max_queue),
    }
    template = template_directory() / _TEMPLATE
    with atomic_directory(output, force=force, is_ours=is_repository) as staging:
        model = staging / model_name
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(fill((template / "config.pbtxt").read_text(), values))
        templates = [template / "1" / name for name in ("model.py", "engine_link.py", "metric_publisher.py")]
        for source in (*templates, Path(wire.__file__), Path(metric_definitions.__file__)):
            shutil.copyfile(source, model / "1" / source.name)
        records = hash_directory(staging, exclude=())
        # Beside the models, where Triton does not look: what this directory is, for `inspect` and for a later
        # `--force`.
        identity = {
            "format_version": FORMAT_VERSION,
            "kind": _KIND,
            "model_name": model_name,
            "engine_dir": str(engines),
            "engine_config_sha256": facts.config_sha256,
            # For who says what runs before the engine does; the engine has them on its command line.
            "block_size": size,
            "max_running": max_running,
            "files": manifest_to_json(records),
        }
        (staging / IDENTITY).write_text(json.dumps(identity, indent=2) + "\n")
    return DeployReport(output, model_name, engines, facts, max_queue, (IDENTITY, *records))


def is_repository(path: Path) -> bool:
    """Whether ``path`` is a model repository that ``deploy`` wrote."""
    try:
        _identity(path)
    except ConfigError:
        return False
    return True


def repository_model(repository: Path) -> str:
    """The name of the model in a repository that ``deploy`` wrote; ``ConfigError`` when it is not one."""
    return _identity(repository).string("model_name")


def repository_runs(repository: Path) -> EngineFacts:
    """Facts of the engine that a repository of ours refers to, with what ``deploy`` chose: what will run.

    Raises:
        ConfigError: not a repository of ours, or its engine directory is gone.
    """
    return _facts_with_choices(_identity(repository))


def repository_facts(repository: Path) -> dict[str, object]:
    """Facts of a model repository for reports, after checking its files and its engine directory against their hashes.

    Raises:
        ConfigError: not a repository of ours. CheckpointError: a file is missing or changed.
        EngineError: the engine directory was rebuilt after ``deploy``.
    """
    identity = _identity(repository)
    verify_directory(repository, manifest_from_json(identity.child("files")))
    engines = Path(identity.string("engine_dir"))
    facts = _facts_with_choices(identity)
    check_fingerprint(engines, identity.string("engine_config_sha256"))
    return {
        "kind": _KIND,
        "model_name": identity.string("model_name"),
        "engine_dir": str(engines),
        "backend": facts.backend,
        "speculation": facts.has_drafter and facts.runs["speculation"] != "off",
        "limits": dataclasses.asdict(facts.limits),
        "files": len(list(identity.child("files"))),
        "hashes": "verified",
    }


def _facts_with_choices(identity: JsonObject) -> EngineFacts:
    facts = read_engine_facts(Path(identity.string("engine_dir")))
    size = identity.integer("block_size", default=facts.limits.block_size, minimum=1)
    return facts.with_choices(block_size=size, max_running=identity.optional_integer("max_running", minimum=1))


def _identity(repository: Path) -> JsonObject:
    path = repository / IDENTITY
    hint = "make one with `trtllm-dflash deploy -e ENGINES -o REPOSITORY`"
    if not path.is_file():
        raise ConfigError(f"{repository}: no {IDENTITY}, expected a model repository", hint=hint)
    identity = read_json(path)
    if identity.string("kind") != _KIND:
        raise identity.error("kind", f'"{_KIND}"', hint=hint)
    return identity


def template_directory() -> Path:
    """Where the templates lie: beside the package in a source checkout, else in the installed package's data."""
    candidates = [Path(trtllm_dflash.__file__).resolve().parents[1] / _TEMPLATES.name]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("trtllm-dflash") or ():
            if file.as_posix().endswith(f"{_TEMPLATES.as_posix()}/{_TEMPLATE}/config.pbtxt"):
                candidates.append(Path(str(file.locate())).resolve().parents[1])
    for candidate in candidates:
        if (candidate / _TEMPLATE / "config.pbtxt").is_file():
            return candidate
    raise ConfigError(
        f"the model repository templates are not in {', '.join(map(str, candidates))}",
        hint="reinstall trtllm-dflash",
    )


def fill(template: str, values: dict[str, str]) -> str:
    """``template`` with each ``@@name@@`` replaced; a name without a value is a ``ConfigError``."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(f"template placeholder @@{match[1]}@@ has no value, expected one of {sorted(values)}")
        return values[match[1]]

    return _PLACEHOLDER.sub(value, template)


def _inputs() -> str:
    return ",\n".join(
        f'  {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] optional: true }}'
        for name, (kind, dims) in INPUTS.items()
    )


def _quoted(text: str) -> str:
    """``text`` inside a protobuf text-format string."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

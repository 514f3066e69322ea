"""The one format of measured results: ``benchmarks/results/NAME.json``.

A file may hold parts that were made at different times and on different machines. ``parts`` says for each part with
which command, at which commit, when, on what machine and with which versions it was made; ``made_by`` names every
figure's part. Where there is no git (a machine that got only the files) the commit is read from the environment
variable ``DFLASH_COMMIT``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_result(
    name: str, figures: Mapping[str, Any], *, shapes: Mapping[str, Any], details: Mapping[str, Any] | None = None
) -> Path:
    """Merge ``figures`` into ``results/NAME.json`` as one part; the other parts keep who made them.

    Args:
        figures: key → number. shapes: what was measured. details: spreads and per-case numbers.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"name": name, "figures": {}}
    part = {
        "command": _command(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    document["shapes"] = {**document.get("shapes", {}), **shapes}
    document["figures"] = {**document["figures"], **figures}
    document["details"] = {**document.get("details", {}), **(details or {})}
    parts, made_by = _parts(document)
    made_by |= dict.fromkeys(figures, _name_of(part, parts))
    used = set(made_by.values())
    document["parts"] = {key: value for key, value in parts.items() if key in used}
    document["made_by"] = made_by
    # The head names the part that made most of the figures.
    counts = {key: sum(value == key for value in made_by.values()) for key in document["parts"]}
    if counts:
        document |= document["parts"][max(counts, key=lambda key: counts[key])]
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(temporary, path)
    return path


def _parts(document: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Parts and each figure's part; figures of the older form carried their maker themselves."""
    parts: dict[str, dict[str, Any]] = dict(document.get("parts", {}))
    made_by: dict[str, str] = {}
    for figure, maker in document.get("made_by", {}).items():
        if isinstance(maker, dict):
            whole = {"machine": document.get("machine"), "versions": document.get("versions", {}), **maker}
            maker = _name_of(whole, parts)
        made_by[figure] = maker
    return parts, made_by


def _name_of(part: dict[str, Any], parts: dict[str, dict[str, Any]]) -> str:
    """The key of ``part`` in ``parts``, added when it is new: its command, numbered where that is taken."""
    for key, known in parts.items():
        if known == part:
            return key
    command = str(part["command"])
    taken = sum(known["command"] == command for known in parts.values())
    key = command if taken == 0 else f"{command} ({taken + 1})"
    while key in parts:
        taken += 1
        key = f"{command} ({taken + 1})"
    parts[key] = part
    return key


def machine() -> str:
    """Kind of processor and GPU, without names of hosts."""
    cores = len(os.sched_getaffinity(0))
    parts = [f"{platform.machine()}, {cores} cores"]
    try:
        import torch

        parts.append(torch.backends.cpu.get_cpu_capability())
        if torch.cuda.is_available():
            parts = [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"]
    except ImportError:
        pass
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "transformers",
        "tokenizers",
        "xgrammar",
        "nvidia-pytriton",
        "dflash",
        "tensorrt-rtx-cu13",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command() -> str:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = module.name if module is not None else Path(sys.argv[0]).name
    # Where something lies on the machine that measured says nothing to whoever repeats it.
    arguments = [Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:]]
    return " ".join(["python -m", name, *arguments])


def _commit() -> str:
    if "DFLASH_COMMIT" in os.environ:
        return os.environ["DFLASH_COMMIT"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"

"""The one format of measured results: ``benchmarks/results/NAME.json``."""

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
    """Merge ``figures`` into ``results/NAME.json``; every figure keeps the command, commit and date that made it.

    Args:
        figures: key → number. shapes: what was measured. details: spreads and per-case numbers.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"name": name, "figures": {}}
    made_by = {"command": _command(), "commit": _commit(), "date": datetime.date.today().isoformat()}
    document |= made_by
    document["machine"] = machine()
    document["versions"] = versions()
    document["shapes"] = {**document.get("shapes", {}), **shapes}
    document["figures"] = {**document["figures"], **figures}
    document["details"] = {**document.get("details", {}), **(details or {})}
    document["made_by"] = {**document.get("made_by", {}), **dict.fromkeys(figures, made_by)}
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(temporary, path)
    return path


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
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"

"""``trtllm-dflash doctor``: what this machine can do, and what brings the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import click

import trtllm_dflash
from trtllm_dflash.cli.extras import Extra, installed_extras


@dataclass(frozen=True)
class Finding:
    """One fact: ``state`` is ok, missing (optional part) or broken (must be mended), ``fix`` a command or advice."""

    name: str
    state: str
    found: str
    fix: str | None = None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what brings the rest: versions, GPUs, Triton, plugin library, extras.

    \b
    Example:
      trtllm-dflash doctor
    """
    findings = examine()
    broken = any(finding.state == "broken" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            mark = {"ok": "ok     ", "missing": "missing", "broken": "BROKEN "}[finding.state]
            click.echo(f"{mark}  {finding.name}: {finding.found}")
            if finding.fix:
                click.echo(f"         → {finding.fix}")
    if broken:
        raise SystemExit(1)


def examine() -> list[Finding]:
    """Every finding, in the order a newcomer needs them."""
    return [
        Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        Finding("trtllm-dflash", "ok", trtllm_dflash.__version__),
        _required("torch", 'pip install "torch>=2.11,<2.14"'),
        _required("transformers", 'pip install "transformers>=5,<6"'),
        _cpu(),
        _gpu(),
        _triton(),
        _plugins(),
        *map(_extra, installed_extras()),
    ]


def _required(module: str, command: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, "broken", "not installed", command)
    try:
        return Finding(module, "ok", importlib.metadata.version(module))
    except importlib.metadata.PackageNotFoundError:
        return Finding(module, "ok", "installed, version unknown")


def _extra(extra: Extra) -> Finding:
    name = f"extra {extra.name} ({extra.purpose})"
    if not extra.is_known:
        found = "the installed package does not know it: it is older than this code, or was not installed"
        return Finding(name, "missing", found, "pip install -e . again in the checkout, or " + extra.command)
    here = ", ".join(extra.found)
    if not extra.lacking:
        return Finding(name, "ok", here)
    lacking = f"not installed: {', '.join(extra.lacking)}"
    return Finding(name, "missing", f"{lacking}; installed: {here}" if here else lacking, extra.command)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Finding("cpu", "ok", f"{cores} cores, {memory:.0f} GiB memory: the torch backend runs here")


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("gpu", "missing", "torch is not installed")
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        return Finding("gpu", "missing", f"no CUDA GPU is usable (torch built for CUDA {built})")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    listed = ", ".join(f"{gpu.name} (SM{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
    return Finding("gpu", "ok", listed)


def _triton() -> Finding:
    from trtllm_dflash.errors import DFlashError

    name = "tritonserver (serve, quickstart)"
    try:
        from trtllm_dflash.serving.triton_install import find_tritonserver

        install: Any = find_tritonserver()
    except DFlashError as error:
        return Finding(name, "missing", error.message, error.hint or 'pip install "trtllm-dflash[triton]"')
    return Finding(name, "ok", str(install.binary))


def _plugins() -> Finding:
    from trtllm_dflash.errors import DFlashError

    name = "CUDA plugin library"
    try:
        from trtllm_dflash.ops.plugin_library import load_library

        library = load_library()
    except (DFlashError, OSError, ImportError) as error:
        return Finding(name, "missing", str(error).splitlines()[0], "trtllm-dflash plugins build")
    return Finding(name, "ok", str(getattr(library, "path", "loaded")))

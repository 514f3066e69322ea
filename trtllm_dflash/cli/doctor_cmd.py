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
    """Say what this machine can do: versions, GPUs, TensorRT, plugin library, Triton.

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
        _package("torch", 'pip install "torch>=2.11,<2.14"', required=True),
        _package("transformers", 'pip install "transformers>=5,<6"', required=True),
        _cpu(),
        _gpu(),
        _package("gguf", 'pip install "trtllm-dflash[demo]"', what="demo pair"),
        _triton(),
        _package("tensorrt", 'pip install "trtllm-dflash[tensorrt]"', what="TensorRT engines"),
        _package("tensorrt_rtx", 'pip install "trtllm-dflash[rtx]"', what="TensorRT-RTX plans without a GPU"),
        _plugins(),
    ]


def _package(module: str, command: str, *, required: bool = False, what: str | None = None) -> Finding:
    name = f"{module} ({what})" if what else module
    if importlib.util.find_spec(module) is None:
        return Finding(name, "broken" if required else "missing", "not installed", command)
    distribution = {"tensorrt_rtx": "tensorrt-rtx-cu13"}.get(module, module)
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed, version unknown")


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

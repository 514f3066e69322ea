"""``trtllm-dflash plugins build`` and ``plugins info``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from trtllm_dflash.cli.progress_bar import waiting
from trtllm_dflash.ops.plugin_build import DEFAULT_SMS, build_library, parse_sms
from trtllm_dflash.ops.plugin_library import load_library


@click.group()
def plugins() -> None:
    """The CUDA plugin library: compile it, or see what one holds.

    \b
    Example:
      trtllm-dflash plugins build
      trtllm-dflash plugins info
    """


@plugins.command("build")
@click.option(
    "--sm",
    "sms",
    default=",".join(map(str, DEFAULT_SMS)),
    show_default=True,
    help="GPU generations to compile for, separated by commas.",
)
@click.option(
    "--tensorrt-root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="TensorRT installation whose headers the wrappers compile against.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File or folder; default: where it is loaded from."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Parallel compilations; default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def build(sms: str, tensorrt_root: Path | None, output: Path | None, jobs: int | None, as_json: bool) -> None:
    """Compile the CUDA plugin library.

    \b
    Example:
      trtllm-dflash plugins build --sm 90,120
    """
    chosen = parse_sms(sms)
    with waiting(f"compiling for SM {', '.join(map(str, chosen))} …"):
        report = build_library(chosen, output, tensorrt_root=tensorrt_root, jobs=jobs)
    if as_json:
        facts = {"path": str(report.path), "sm": list(report.sms), "elapsed_s": round(report.elapsed_s, 1)}
        click.echo(json.dumps(facts))
    else:
        click.echo(f"{report.path}: SM {', '.join(map(str, report.sms))}, compiled in {report.elapsed_s:.0f} s")


@plugins.command("info")
@click.argument("path", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def info(path: Path | None, as_json: bool) -> None:
    """Say what a library holds: version, GPU architectures, kernels and plugins.

    \b
    Example:
      trtllm-dflash plugins info --json
    """
    facts = dataclasses.asdict(load_library(path).info) | {"path": str(path or load_library().info.path)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(value) or "none" if isinstance(value, tuple) else value
        click.echo(f"{name:<{width}}  {text}")

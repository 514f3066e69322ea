"""``trtllm-dflash deploy``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click


@click.command()
@click.option(
    "-e", "--engines", required=True, type=click.Path(path_type=Path), help="Engine directory, written by `build`."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Model repository to write.")
@click.option("--model-name", default="dflash", show_default=True, help="Triton's name of the model.")
@click.option(
    "--max-queue", default=256, show_default=True, type=int, help="Requests that may wait; one more is refused."
)
@click.option("--device", default=None, help="cpu or cuda:N; default: the first GPU, else the CPU.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Compute prompts that begin alike once."
)
@click.option("--force", is_flag=True, help="Replace an existing model repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def deploy(
    engines: Path,
    output: Path,
    model_name: str,
    max_queue: int,
    device: str | None,
    prefix_cache: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a Triton model repository that serves an engine directory.

    \b
    Example:
      trtllm-dflash deploy -e engines -o triton_models
      trtllm-dflash serve -m triton_models
    """
    from trtllm_dflash.serving import repository

    report = repository.deploy(
        engines,
        output,
        model_name=model_name,
        max_queue=max_queue,
        device=device,
        prefix_cache=prefix_cache,
        force=force,
    )
    limits = dataclasses.asdict(report.facts.limits)
    if as_json:
        facts = {
            "repository": str(report.repository),
            "model_name": report.model_name,
            "engines": str(report.engines),
            "backend": report.facts.backend,
            "speculation": report.facts.has_drafter,
            "limits": limits,
            "max_queue": report.max_queue,
            "files": list(report.files),
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"{report.repository}: model {report.model_name}, engines {report.engines} ({report.facts.backend})")
    click.echo("limits: " + ", ".join(f"{name} {value}" for name, value in {**limits, "max_queue": max_queue}.items()))
    click.echo(f"next: trtllm-dflash serve -m {report.repository}")

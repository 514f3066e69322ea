"""``trtllm-dflash deploy``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.cli.option_checks import given, refuse_given
from trtllm_dflash.cli.speculation_option import speculation_option
from trtllm_dflash.config.sampling import SpeculationMode


@click.command()
@click.option(
    "-e",
    "--engines",
    type=click.Path(path_type=Path),
    help="Engine directory, written by `build`.  [default: the one of --from-sweep]",
)
@click.option("--from-sweep", type=click.Path(path_type=Path), help="Deploy what a sweep chose for its target.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Model repository to write.")
@click.option("--model-name", default="dflash", show_default=True, help="Triton's name of the model.")
@click.option(
    "--max-queue", default=256, show_default=True, type=int, help="Requests that may wait; one more is refused."
)
@click.option("--device", default=None, help="cpu or cuda:N; default: the first GPU, else the CPU.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Compute prompts that begin alike once."
)
@speculation_option
@click.option("--block-size", type=int, help="Block size S.  [default: the engine's, or the sweep's]")
@click.option("--max-running", type=int, help="Requests that run together.  [default: the engine's, or the sweep's]")
@click.option("--kv-cache-tokens", type=int, help="Tokens of the KV caches.  [default: by memory, or the sweep's]")
@click.option(
    "--runtime",
    default="dflash",
    show_default=True,
    type=click.Choice(["dflash", "trtllm"]),
    help="trtllm writes the configuration that serves the same pair on TensorRT-LLM instead; --model-name, --max-queue "
    "and --device have no meaning there.",
)
@click.option(
    "--target", help="With --runtime trtllm: the target's Hugging Face id or directory.  [default: as converted]"
)
@click.option("--drafter", help="With --runtime trtllm: the drafter's.  [default: as converted]")
@click.option("--force", is_flag=True, help="Replace an existing model repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def deploy(
    engines: Path | None,
    from_sweep: Path | None,
    output: Path,
    model_name: str,
    max_queue: int,
    device: str | None,
    prefix_cache: bool,
    speculation: SpeculationMode,
    block_size: int | None,
    max_running: int | None,
    kv_cache_tokens: int | None,
    runtime: str,
    target: str | None,
    drafter: str | None,
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

    if runtime == "trtllm":
        refuse_given(
            ("model_name", "max_queue", "device"),
            "with --runtime trtllm: leave it away, or give TensorRT-LLM's own option to the command that is printed",
        )
    elif target is not None or drafter is not None:
        raise click.UsageError("--target and --drafter belong to --runtime trtllm: an engine directory has its weights")
    if from_sweep is not None:
        from trtllm_dflash.bench.deploy_from_sweep import choice_of_sweep

        choice = choice_of_sweep(from_sweep, engines)
        engines = choice.engines
        # A block size that is given says that there is to be speculation, whatever the sweep chose.
        if not given("speculation", "no_speculation") and not (choice.speculation == "off" and (block_size or 1) > 1):
            speculation = choice.speculation
        if block_size is None and speculation != "off":
            block_size = choice.block_size
        max_running = choice.max_running if max_running is None else max_running
        kv_cache_tokens = choice.kv_cache_tokens if kv_cache_tokens is None else kv_cache_tokens
        for remark in choice.remarks:
            click.echo(remark, err=True)
    if engines is None:
        raise click.UsageError("give --engines, or --from-sweep")
    choices: dict[str, Any] = {
        "prefix_cache": prefix_cache,
        "speculation": speculation,
        "block_size": block_size,
        "max_running": max_running,
        "kv_cache_tokens": kv_cache_tokens,
    }
    if runtime == "trtllm":
        _deploy_trtllm(engines, output, target, drafter, choices, force=force, as_json=as_json)
        return
    report = repository.deploy(
        engines, output, model_name=model_name, max_queue=max_queue, device=device, force=force, **choices
    )
    limits = dataclasses.asdict(report.facts.limits)
    if as_json:
        facts = {
            "repository": str(report.repository),
            "model_name": report.model_name,
            "engines": str(report.engines),
            "backend": report.facts.backend,
            "speculation": report.facts.has_drafter and speculation != "off" and block_size != 1,
            "limits": limits,
            "max_queue": report.max_queue,
            "files": list(report.files),
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"{report.repository}: model {report.model_name}, engines {report.engines} ({report.facts.backend})")
    click.echo("limits: " + ", ".join(f"{name} {value}" for name, value in {**limits, "max_queue": max_queue}.items()))
    click.echo(f"next: trtllm-dflash serve -m {report.repository}")


def _deploy_trtllm(
    engines: Path,
    output: Path,
    target: str | None,
    drafter: str | None,
    choices: dict[str, Any],
    *,
    force: bool,
    as_json: bool,
) -> None:
    from trtllm_dflash.serving.trtllm_runtime import deploy_trtllm

    report = deploy_trtllm(engines, output, target=target, drafter=drafter, force=force, **choices)
    if as_json:
        facts = {
            "output": str(report.output),
            "files": list(report.files),
            "serve": report.serve_command,
            "triton": list(report.triton_commands),
        }
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{report.output}: {', '.join(report.files)} for TensorRT-LLM's PyTorch backend (not run by this toolkit)"
    )
    click.echo(f"next: {report.serve_command}")
    click.echo("or with Triton:")
    for command in report.triton_commands:
        click.echo(f"  {command}")
    click.echo("then: trtllm-dflash sweep --url http://HOST:8000 --label TensorRT-LLM …")

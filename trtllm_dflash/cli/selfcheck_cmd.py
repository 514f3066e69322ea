"""``trtllm-dflash selfcheck``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.cli.progress_bar import plan_progress


@click.command()
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(["torch", "tensorrt", "tensorrt-rtx"]),
    help="Check only this one; repeatable.  [default: all]",
)
@click.option("--device", help="cpu or cuda:N.  [default: first GPU, else CPU]")
@click.option("--max-tokens", type=click.IntRange(min=8), default=64, show_default=True, help="Output of a request.")
@click.option("--workdir", type=click.Path(file_okay=False, path_type=Path), help="Keep engine directories here.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON document here as well."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def selfcheck(
    backends: tuple[str, ...],
    device: str | None,
    max_tokens: int,
    workdir: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prove an installation: build and run the demo pair with every backend that is there.

    Compares tokens, caches and acceptance with the torch backend, times both, and says what it skipped. The document
    has no prompts, paths or names of hosts: attach it to an issue.

    \b
    Example:
      trtllm-dflash selfcheck -o selfcheck.json
    """
    from trtllm_dflash.bench.selfcheck import SUBJECTS, run_selfcheck
    from trtllm_dflash.bench.sweep_journal import written_whole
    from trtllm_dflash.checkpoint.convert import convert

    subjects = [one for one in SUBJECTS if not backends or one.backend in backends]
    with tempfile.TemporaryDirectory() as temporary, plan_progress("selfcheck") as progress:
        folder = Path(temporary) if workdir is None else workdir
        folder.mkdir(parents=True, exist_ok=True)
        converted: dict[str, Path] = {}

        def checkpoint_of(dtype: str) -> Path:
            if dtype not in converted:
                converted[dtype] = folder / f"checkpoint-{dtype}"
                convert("demo", "demo", converted[dtype], dtype=dtype, force=True)
            return converted[dtype]

        document = run_selfcheck(
            checkpoint_of, folder, subjects=subjects, device=device, max_tokens=max_tokens, progress=progress
        )
    # Before it is written: minutes of work are not lost to a place that cannot be written to.
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(document)
    if output is not None:
        with written_whole(output) as partial:
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if document["verdict"] != "passed":
        raise SystemExit(1)


def _print(document: dict[str, Any]) -> None:
    for check in document["checks"]:
        click.echo(f"{check['status']:8s} {check['name']}" + (f": {check['why']}" if "why" in check else ""))
        speed, reference = check.get("speed"), check.get("speed_reference")
        if speed:
            for name, value in speed.items():
                beside = f" (torch {reference[name]:.1f})" if reference else ""
                click.echo(f"           {name.removesuffix('_tok_s').replace('_', ' ')}: {value:.1f} tok/s{beside}")
        if check.get("acceptance_length") is not None:
            click.echo(f"           acceptance length {check['acceptance_length']:.2f}")
    counts = ", ".join(f"{document[state]} {state}" for state in ("passed", "failed", "skipped"))
    click.echo(f"{document['verdict']}: {counts} in {document['seconds']:.0f} s on {document['device']}")

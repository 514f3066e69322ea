"""``trtllm-dflash build``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from trtllm_dflash.config.block_size_words import translate_block_size


@click.command()
@click.option(
    "-c", "--checkpoint", required=True, type=click.Path(path_type=Path), help="Directory written by convert."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "torch", "tensorrt", "tensorrt-rtx"]),
    default="auto",
    show_default=True,
    help="What runs the networks; auto takes torch, which needs no TensorRT.",
)
@click.option("--max-batch-size", type=int, help="Running requests at a time.  [default: 16]")
@click.option("--max-seq-len", type=int, help="Prompt plus output tokens of one request.  [default: up to 4096]")
@click.option("--max-num-tokens", type=int, help="Prompt tokens of one pass.  [default: 2048]")
@click.option("--block-size", type=int, help="Draft block S, anchor included.  [default: the checkpoint's]")
@click.option("--max-draft-len", type=int, help="The same in TensorRT-LLM's words: S - 1.")
@click.option("--speculative-num-draft-tokens", type=int, help="The same in SGLang's words: S.")
@click.option("--force", is_flag=True, help="Replace an engine directory that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def build(
    checkpoint: Path,
    output: Path,
    backend: str,
    max_batch_size: int | None,
    max_seq_len: int | None,
    max_num_tokens: int | None,
    block_size: int | None,
    max_draft_len: int | None,
    speculative_num_draft_tokens: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build an engine directory from a checkpoint directory.

    \b
    Example:
      trtllm-dflash build -c checkpoint -o engines --max-batch-size 32
    """
    from trtllm_dflash.engine.build import build as build_engine

    words = {
        "--block-size": block_size,
        "--max-draft-len": max_draft_len,
        "--speculative-num-draft-tokens": speculative_num_draft_tokens,
    }
    given = [(word, value) for word, value in words.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(word for word, _ in given)} say the same thing: give one of them")
    for word, value in given:
        translation = translate_block_size(word, value)
        block_size = translation.block_size
        if translation.line:
            click.echo(translation.line, err=True)
    with Console(stderr=True).status(f"building {output} …"):
        report = build_engine(
            checkpoint,
            output,
            backend=backend,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            block_size=block_size,
            force=force,
        )
    limits = report.limits
    facts = {
        "output": str(report.output),
        "backend": report.backend,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "block_size": limits.block_size,
        "page_tokens": limits.page_tokens,
        "bytes": report.bytes,
        "elapsed_s": round(report.elapsed_s, 2),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{report.output}: backend {report.backend}, block size {limits.block_size}, "
        f"up to {limits.max_batch_size} requests of {limits.max_seq_len} tokens, "
        f"{report.bytes / 1e6:.0f} MB in {report.elapsed_s:.1f} s"
    )

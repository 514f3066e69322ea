"""``trtllm-dflash convert``: checkpoints to a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import click

from trtllm_dflash.cli.progress_bar import progress_bar
from trtllm_dflash.config.dtypes import ComputeDtype
from trtllm_dflash.config.mapping import KvCacheDtype, QuantAlgo

_EPILOG = """\b
Examples:
  trtllm-dflash convert --target demo --drafter demo -o checkpoint
  trtllm-dflash convert --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --quantization fp8 --tp-size 2 -o checkpoint
"""


@click.command(epilog=_EPILOG)
@click.option("--target", required=True, metavar="DIR|HF-ID|demo", help="The target model.")
@click.option("--drafter", required=True, metavar="DIR|HF-ID|demo|none", help="Its DFlash or DFlash 2 drafter.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Checkpoint directory to write.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *get_args(ComputeDtype)]),
    default="auto",
    show_default=True,
    help="Compute dtype; auto is the target's own (float32 for demo).",
)
@click.option("--tp-size", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option(
    "--quantization",
    type=click.Choice(list(get_args(QuantAlgo))),
    default="none",
    show_default=True,
    help="Quantise the weights of the target's linear layers.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(list(get_args(KvCacheDtype))),
    default="auto",
    show_default=True,
    help="Dtype of the target's KV cache; auto is the compute dtype. fp8 is for the torch backend on a GPU with the "
    "plugin library, in bfloat16 or float16; on a CPU such an engine runs with the compute dtype.",
)
@click.option("--force", is_flag=True, help="Replace an existing checkpoint directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
def convert(
    target: str,
    drafter: str,
    output: Path,
    dtype: str,
    tp_size: int,
    quantization: str,
    kv_cache_dtype: str,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a target and its drafter into one checkpoint directory.

    Weights are streamed: memory stays near the largest single tensor. A hub id may end in @REVISION.
    """
    # Imported here: torch takes seconds to load, and --help should not.
    from trtllm_dflash.checkpoint.convert import convert as run

    with progress_bar() as progress:
        report = run(
            target,
            None if drafter == "none" else drafter,
            output,
            dtype=dtype,
            tp_size=tp_size,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            force=force,
            progress=progress,
        )
    if as_json:
        facts = {
            "output": str(report.output),
            "dtype": report.dtype,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "seconds": round(report.seconds, 3),
            "peak_host_mb": round(report.peak_host_mb, 1),
            "notes": list(report.notes),
        }
        click.echo(json.dumps(facts, indent=2))
        return
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo(
        f"{report.output}: {report.tensors} tensors, {report.bytes / 1e6:.1f} MB, {report.dtype}, in "
        f"{report.seconds:.1f} s, peak host memory {report.peak_host_mb:.0f} MB"
    )

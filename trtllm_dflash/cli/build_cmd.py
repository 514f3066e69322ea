"""``trtllm-dflash build``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from trtllm_dflash.cli.option_checks import refuse_given
from trtllm_dflash.cli.progress_bar import plan_progress
from trtllm_dflash.config.block_size_words import translate_block_size
from trtllm_dflash.config.typed_json import to_json
from trtllm_dflash.engine.plan_facts import Lowering, WeightsMode


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
    help="What runs the networks; auto takes torch, which needs no TensorRT; tensorrt-rtx builds without a GPU.",
)
@click.option("--max-batch-size", type=int, help="Running requests at a time.  [default: 16]")
@click.option("--max-seq-len", type=int, help="Prompt plus output tokens of one request.  [default: up to 4096]")
@click.option("--max-num-tokens", type=int, help="Prompt tokens of one step of the engine.  [default: 2048]")
@click.option("--block-size", type=int, help="Draft block S, anchor included.  [default: the checkpoint's]")
@click.option("--max-draft-len", type=int, help="The same in TensorRT-LLM's words: S - 1.")
@click.option("--speculative-num-draft-tokens", type=int, help="The same in SGLang's words: S.")
@click.option(
    "--lowering",
    type=click.Choice(["plugin", "native"]),
    help="TensorRT: attention, injection and proposals as layers of the plugin library over paged caches, or as "
    "TensorRT's own layers over linear caches.  [default: plugin for tensorrt, native for tensorrt-rtx]",
)
@click.option(
    "--plugin-library",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The plugin lowering's library.  [default: $TRTLLM_DFLASH_PLUGIN_LIBRARY, or what plugins build made]",
)
@click.option(
    "--weights",
    type=click.Choice(["external", "embedded"]),
    default="external",
    show_default=True,
    help="TensorRT: weights stay in the rank files and are bound at load, or go into the plans.",
)
@click.option(
    "--target-sm",
    help="TensorRT-RTX: compute capabilities to build for, such as 120 or 89,120.  [default: 120]",
)
@click.option(
    "--timing-cache", type=click.Path(path_type=Path, dir_okay=False), help="TensorRT: file to read and update."
)
@click.option("--dry-run", is_flag=True, help="Say what would be built and what memory it takes; write nothing.")
@click.option("--gpu-memory-gb", type=float, help="With --dry-run: memory of the GPU that will run it, in GB (10^9).")
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
    lowering: Lowering | None,
    plugin_library: Path | None,
    weights: WeightsMode,
    target_sm: str | None,
    timing_cache: Path | None,
    dry_run: bool,
    gpu_memory_gb: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build an engine directory from a checkpoint directory.

    \b
    Example:
      trtllm-dflash build -c checkpoint -o engines --max-batch-size 32
      trtllm-dflash build -c checkpoint -o engines --backend tensorrt-rtx --target-sm 120
      trtllm-dflash build -c checkpoint -o engines --backend tensorrt --lowering native
    """
    from trtllm_dflash.engine.build import build as build_engine
    from trtllm_dflash.engine.build_estimate import estimate_build

    if not dry_run:
        refuse_given(("gpu_memory_gb",), "without --dry-run")
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
    limits_asked = {
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        "block_size": block_size,
    }
    sms = _compute_capabilities(target_sm)
    if dry_run or backend.startswith("tensorrt"):
        estimate = estimate_build(
            checkpoint,
            backend=backend,
            lowering=lowering,
            weights=weights,
            target_sm=sms,
            plugin_library=plugin_library,
            gpu_memory_bytes=None if gpu_memory_gb is None else int(gpu_memory_gb * 1e9),
            **limits_asked,
        )
        if dry_run:
            click.echo(json.dumps(to_json(estimate), indent=2) if as_json else "\n".join(estimate.lines()))
            return
        click.echo(f"expected peak host memory: {estimate.host_peak_mb:.0f} MB", err=True)
    with plan_progress(f"building {output} …") as progress:
        report = build_engine(
            checkpoint,
            output,
            backend=backend,
            lowering=lowering,
            weights=weights,
            target_sm=sms,
            plugin_library=plugin_library,
            timing_cache=timing_cache,
            force=force,
            progress=progress,
            **limits_asked,
        )
    limits, plans = report.limits, report.tensorrt
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
        "tensorrt": None if plans is None else to_json(plans) | {"plan_bytes": report.plan_bytes},
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{report.output}: backend {report.backend}, block size {limits.block_size}, "
        f"up to {limits.max_batch_size} requests of {limits.max_seq_len} tokens, "
        f"{report.bytes / 1e6:.0f} MB in {report.elapsed_s:.1f} s"
    )
    if plans is not None:
        click.echo(
            f"{plans.package} {plans.version}, SM {', '.join(map(str, plans.target_sm))}, lowering {plans.lowering}, "
            f"weights {plans.weights}, plans {report.plan_bytes / 1e6:.0f} MB, "
            f"peak host memory {plans.peak_host_mb:.0f} MB"
        )


def _compute_capabilities(text: str | None) -> tuple[int, ...]:
    """``"89,120"`` → (89, 120); also "12.0" and "sm_120"."""
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        digits = re.fullmatch(r"\s*(?:sm_?)?(\d+)\.?(\d)\s*", part, re.IGNORECASE)
        if digits is None:
            raise click.BadParameter(
                f"{part.strip()!r}: expected a compute capability such as 120", param_hint="--target-sm"
            )
        found.append(int(digits[1] + digits[2]))
    return tuple(dict.fromkeys(found))

"""``trtllm-dflash bench``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.cli.load_options import load_options, workload_from_options
from trtllm_dflash.cli.option_checks import refuse_given
from trtllm_dflash.cli.progress_bar import plan_progress
from trtllm_dflash.cli.speculation_option import speculation_option
from trtllm_dflash.config.sampling import SpeculationMode

if TYPE_CHECKING:
    from trtllm_dflash.bench.measurement import Measurement, Percentiles


@click.command()
@click.option("-e", "--engines", type=click.Path(path_type=Path), help="Engine directory, run in this process.")
@click.option("--url", help="Or a served endpoint, http://host:port: Triton, or an OpenAI-compatible server.")
@click.option("--api", type=click.Choice(["triton", "openai"]), help="Kind of endpoint.  [default: asked]")
@click.option("--model", help="Name of the served model.  [default: asked]")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Engine or tokenizer directory, for the chat template of a Triton model.",
)
@click.option("--gpus", type=int, help="GPUs that serve, for tok/s per GPU.  [default: the engine's ranks, or 1]")
@load_options
@click.option("--concurrency", type=int, help="Requests in flight, all the time.  [default: 1 without a rate]")
@click.option(
    "--request-rate", type=float, metavar="R", help="Poisson arrivals, R a second; --concurrency then bounds them."
)
@click.option("--num-prompts", type=int, default=32, show_default=True, help="Measured requests.")
@click.option(
    "--warm-up",
    type=int,
    help="Requests of staggered lengths before them, not measured; nor are those sent until the last of these ended.  "
    "[default: the concurrency]",
)
@speculation_option
@click.option("--block-size", type=int, help="Block size S for this run, up to the engine's.")
@click.option("--kv-cache-tokens", type=int, help="Tokens of the KV cache.  [default: what this load needs]")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=False, show_default=True, help="Compute shared prefixes once."
)
@click.option("--stages/--no-stages", default=True, show_default=True, help="Time the stages of a cycle first.")
@click.option(
    "--cycle-table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write seconds per cycle by batch and block size here, for sweep --predict.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def bench(
    engines: Path | None,
    url: str | None,
    api: Any,
    model: str | None,
    tokenizer: Path | None,
    gpus: int | None,
    concurrency: int | None,
    request_rate: float | None,
    num_prompts: int,
    warm_up: int | None,
    speculation: SpeculationMode,
    block_size: int | None,
    kv_cache_tokens: int | None,
    prefix_cache: bool,
    stages: bool,
    cycle_table: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure one load: latency, throughput, acceptance.

    Warm-up is not measured, and the load is kept up until the last measured request has ended.

    \b
    Example:
      trtllm-dflash bench -e engines --dataset gsm8k.jsonl --concurrency 8
      trtllm-dflash bench --url http://127.0.0.1:8000 --tokenizer engines --dataset gsm8k.jsonl
    """
    from trtllm_dflash.bench.capacity import cut_warning, left_out_warning, queueing_warning
    from trtllm_dflash.bench.configuration import Configuration, open_configuration
    from trtllm_dflash.bench.load import Load
    from trtllm_dflash.bench.machine import machine_facts
    from trtllm_dflash.bench.run import run_point
    from trtllm_dflash.bench.stages import stage_seconds, write_cycle_table
    from trtllm_dflash.config.typed_json import to_json
    from trtllm_dflash.runtime.cycle_runner import batch_choices, block_size_choices

    if (engines is None) == (url is None):
        raise click.UsageError("give --engines or --url, one of them")
    if url is not None and cycle_table is not None:
        raise click.UsageError("--cycle-table belongs to --engines: cycles of a server cannot be timed from outside")
    if url is not None:
        refuse_given(
            ("speculation", "no_speculation", "block_size", "kv_cache_tokens", "prefix_cache", "stages", "device"),
            "with --url: that is the server's business",
        )
    else:
        refuse_given(("api", "model", "tokenizer"), "with --engines: it belongs to --url")
    if concurrency is None and request_rate is None:
        concurrency = 1
    load = Load(concurrency, request_rate, num_prompts, warm_up)
    device = options.pop("device")
    workload = workload_from_options(options, count=None, engines=engines)
    configuration = Configuration(
        label=engines.name if engines is not None else str(url),
        engines=engines,
        url=url,
        speculation=speculation,
        block_size=block_size,
        kv_cache_tokens=kv_cache_tokens,
        prefix_cache=prefix_cache,
        api=api,
        model=model,
        tokenizer=tokenizer,
        gpus=gpus,
    )
    with plan_progress("opening …") as progress:
        progress("opening …", 0, 0)
        opened = open_configuration(configuration, workload, device=device, concurrency=concurrency)
        try:
            if stages:
                progress("timing stages …", 0, 0)
            stage_s = stage_seconds(opened, concurrency or 1, workload.params.max_tokens) if stages else None
            if cycle_table is not None and opened.llm is not None:
                progress("timing cycles …", 0, 0)
                write_cycle_table(
                    opened.llm,
                    cycle_table,
                    batches=batch_choices(opened.llm.limits.max_batch_size),
                    block_sizes=block_size_choices(opened.llm.block_size),
                )
            # Before the load: who did not mean it can stop here.
            remarks = [
                queueing_warning(opened.facts, [] if concurrency is None else [concurrency]),
                left_out_warning(opened.facts),
            ]
            _warn(remarks)
            progress("warming up …", 0, num_prompts)
            measured = run_point(opened, workload, load, progress=progress)
        finally:
            opened.close()
    cut = cut_warning(measured.cut_short, measured.requests)
    _warn([cut])
    if as_json:
        document = {
            "kind": "bench",
            "schema_version": 1,
            "configuration": opened.facts,
            "workload": workload.facts(),
            "load": {
                "concurrency": concurrency,
                "request_rate": request_rate,
                "warm_up": load.warm_up_requests,
            },
            "result": to_json(measured),
            "stage_s": stage_s,
            "warnings": [text for text in (*remarks, cut) if text is not None],
            "machine": machine_facts(),
        }
        click.echo(json.dumps(document))
    else:
        _print(measured, stage_s, opened.facts, load, workload.forced_acceptance, len(opened.prompts))
    if measured.errors:
        click.echo(
            f"error: {measured.errors} of {measured.requests} requests failed, the first with: {measured.first_error}",
            err=True,
        )
        raise SystemExit(1)


def _warn(texts: Sequence[str | None]) -> None:
    for text in texts:
        if text is not None:
            click.echo(f"warning: {text}", err=True)


def _print(
    m: Measurement,
    stage_s: dict[str, float] | None,
    facts: dict[str, object],
    load: Any,
    forced: float | None,
    prompts: int,
) -> None:
    what = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    rate = f"{load.request_rate} requests/s" if load.request_rate else f"concurrency {load.concurrency}"
    click.echo(f"{what}\n{rate}, {m.requests} requests in {m.window_s:.2f} s, {m.in_flight:.1f} in flight on average")
    if m.requests > prompts:
        click.echo(f"note: there are {prompts} prompts, so some were sent more than once")
    if forced is not None:
        click.echo(
            f"ACCEPTANCE FORCED to {forced} tokens a cycle (bonus counted): speed only, outputs are not the model's"
        )
    click.echo(f"\ntok/s              {m.tok_s:10.1f}   ({m.requests_s:.2f} requests/s)")
    if m.tok_s_user is not None:
        click.echo(f"tok/s per user     {m.tok_s_user:10.1f}")
    click.echo(
        f"tok/s per GPU      {m.tok_s_gpu:10.1f}   ({m.gpus} x {'GPU' if facts.get('device') != 'cpu' else 'CPU'})"
    )
    click.echo(f"\n{'ms':18s} {'mean':>10s} {'p50':>10s} {'p95':>10s} {'p99':>10s}")
    for name, sample in _latencies(m):
        if sample is not None:
            values = " ".join(f"{value:10.1f}" for value in (sample.mean, sample.p50, sample.p95, sample.p99))
            click.echo(f"{name:18s} {values}")
    if m.acceptance is not None:
        a = m.acceptance
        click.echo(f"\nacceptance length  {a.acceptance_length:10.2f}   pooled over {a.cycles} cycles")
        click.echo(f"                   {a.acceptance_length_per_request:10.2f}   mean of the requests' own")
        if a.per_position:
            shares = " ".join(f"{share:.0%}" for share in a.per_position)
            click.echo(f"kept at least 1, 2, … drafts: {shares}")
    if stage_s is not None:
        total = sum(stage_s.values())
        parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in stage_s.items())
        click.echo(f"\ncycle by stage, each timed alone: {parts}; together {total * 1e3:.2f} ms")
    if m.joules_per_token is not None:
        click.echo(f"energy             {m.joules_per_token:10.3f}   J per token (NVML)")


def _latencies(m: Measurement) -> list[tuple[str, Percentiles | None]]:
    return [
        ("first token", m.ttft_ms),
        ("between events", m.itl_ms),
        ("per output token", m.tpot_ms),
        ("whole request", m.e2e_ms),
    ]

"""``trtllm-dflash sweep`` and ``sweep compare``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.cli.load_options import load_options, workload_from_options
from trtllm_dflash.cli.option_checks import refuse_given
from trtllm_dflash.cli.progress_bar import plan_progress

if TYPE_CHECKING:
    from trtllm_dflash.bench.configuration import Configuration


@click.group(invoke_without_command=True)
@click.option("-e", "--engines", multiple=True, type=click.Path(path_type=Path), help="Engine directory; repeatable.")
@click.option(
    "--configs",
    metavar="WORDS|FILE.yaml",
    help="plain, auto, dflash, dflash2, S=N, dflash2:S=N, separated by commas; or a YAML file.  [default: plain,auto]",
)
@click.option("--url", multiple=True, help="A served endpoint as one more configuration; repeatable.")
@click.option("--label", multiple=True, help="Its name in the chart, in the order of --url.")
@click.option("--model", help="Name of the served model.  [default: asked]")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Engine or tokenizer directory, for the chat template of Triton models.  [default: the first engine's]",
)
@click.option("--gpus", type=int, help="GPUs behind each --url.  [default: 1]")
@click.option(
    "--load-generator",
    type=click.Choice(["builtin", "aiperf"]),
    default="builtin",
    show_default=True,
    help="Who sends to each --url; aiperf needs an OpenAI endpoint.",
)
@click.option("--aiperf-command", default="aiperf", show_default=True, help="AIPerf's executable.")
@click.option("--concurrency", default="1,2,4,8", show_default=True, help="For example 1,2,4 or 1..256.")
@click.option("--repeats", default=3, show_default=True, help="Runs per point; 3 or more for confidence intervals.")
@click.option("--requests-per-user", default=4, show_default=True, help="Measured requests per concurrency.")
@click.option("--min-requests", default=8, show_default=True, help="Measured requests of a run at least.")
@click.option("--num-prompts", type=int, help="Use the first N prompts of the data set.  [default: all]")
@load_options
@click.option("--max-open", type=int, help="Engines loaded at a time.  [default: all on a CPU, 1 on a GPU]")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Output directory; a sweep there goes on."
)
@click.option("--target-tok-s-user", type=float, metavar="X", help="Name the best point with X tok/s per user or more.")
@click.option("--ttft-p95", type=float, metavar="MS", help="… whose first token comes within MS at p95.")
@click.option("--itl-p95", type=float, metavar="MS", help="… whose pauses between events are within MS at p95.")
@click.option(
    "--predict",
    multiple=True,
    metavar="WORDS",
    help="Add a predicted curve, e.g. al=6.35, gpu=B200, tp=2, S=4, from=LABEL, comma-separated; repeatable.",
)
@click.option("--cycle-table", type=click.Path(path_type=Path), help="JSON of seconds per cycle, for --predict.")
@click.option("--json", "as_json", is_flag=True, help="Print results.json.")
@click.pass_context
def sweep(
    context: click.Context,
    engines: tuple[Path, ...],
    configs: str | None,
    url: tuple[str, ...],
    label: tuple[str, ...],
    model: str | None,
    tokenizer: Path | None,
    gpus: int | None,
    load_generator: Any,
    aiperf_command: str,
    concurrency: str,
    repeats: int,
    requests_per_user: int,
    min_requests: int,
    num_prompts: int | None,
    max_open: int | None,
    output: Path | None,
    target_tok_s_user: float | None,
    ttft_p95: float | None,
    itl_p95: float | None,
    predict: tuple[str, ...],
    cycle_table: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Throughput against interactivity over concurrencies and configurations.

    Writes results.json, results.csv, pareto.svg, pareto.png and report.html. Killed or interrupted, the same command
    goes on from the finished points, and measures runs again of which requests
    failed.

    \b
    Example:
      trtllm-dflash sweep -e engines --dataset gsm8k.jsonl --configs plain,dflash2 --concurrency 1..64 -o sweep
      trtllm-dflash sweep compare old-sweep sweep
    """
    if context.invoked_subcommand is not None:
        every = tuple(str(parameter.name) for parameter in context.command.params)
        refuse_given(every, f"before {context.invoked_subcommand}, which measures nothing")
        return
    from trtllm_dflash.bench.machine import machine_facts
    from trtllm_dflash.bench.predict_requests import predict_curve, read_cycle_table
    from trtllm_dflash.bench.sweep_output import require_packages, write_output
    from trtllm_dflash.bench.sweep_plan import SweepPlan, parse_concurrencies
    from trtllm_dflash.bench.sweep_results import make_results
    from trtllm_dflash.bench.sweep_run import run_sweep
    from trtllm_dflash.bench.targets import Target, best_point, deployment_of, forget_deployment, write_deployment

    if output is None:
        raise click.UsageError("give -o/--output, the directory of results")
    _refuse_without_effect(configs, load_generator, has_url=bool(url), has_predictions=bool(predict))
    require_packages()
    device = options.pop("device")
    shared = {"model": model, "gpus": gpus, "load_generator": load_generator, "aiperf_command": aiperf_command}
    configurations = _configurations(engines, configs, url, label, tokenizer, shared)
    in_process = [one for one in configurations if one.engines is not None]
    if not in_process:
        refuse_given(("device", "max_open"), "without engines in this process")
    plan = SweepPlan(
        tuple(configurations),
        parse_concurrencies(concurrency),
        repeats=repeats,
        requests_per_user=requests_per_user,
        min_requests=min_requests,
        device=device,
        max_open=max_open or (1 if in_process and _on_gpu(device) else None),
    )
    first = in_process[0].engines if in_process else None
    workload = workload_from_options(options, count=num_prompts, engines=first)
    table = read_cycle_table(cycle_table) if cycle_table is not None else None
    _warn_of_queues(in_process, plan.concurrencies)
    with plan_progress("sweep") as progress:
        method, runs = run_sweep(plan, workload, output, progress=progress)
    labels = [one.label for one in configurations]
    document = make_results(runs, method, machine_facts(), labels=labels, command=_command())
    for words in predict:
        document["predictions"].append(predict_curve(document, words, concurrencies=plan.concurrencies, table=table))
    target = Target(target_tok_s_user, ttft_p95, itl_p95)
    if target:
        document["best"] = best_point(document, target)
    paths = write_output(document, output)
    if target:
        forget_deployment(output)
    if target and document["best"]["found"]:
        paths.append(write_deployment(deployment_of(document, document["best"], configurations), output))
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(document)
        click.echo("written: " + ", ".join(str(path) for path in paths), err=True)
    if target and not document["best"]["found"]:
        raise SystemExit(1)


@sweep.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
@click.option("--min-change", default=2.0, show_default=True, help="Changes below this many percent never count.")
@click.option("--fail-on-regression", is_flag=True, help="Exit with 1 when a point got worse beyond noise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare(before: Path, after: Path, min_change: float, fail_on_regression: bool, as_json: bool) -> None:
    """Which points moved beyond noise between two sweeps.

    A point moved when Welch's t test over the repeats, corrected for the number of comparisons, says so.

    \b
    Example:
      trtllm-dflash sweep compare sweep-main sweep-branch --fail-on-regression
    """
    from trtllm_dflash.bench.compare import compare_sweeps
    from trtllm_dflash.bench.sweep_results import read_results
    from trtllm_dflash.config.typed_json import to_json

    changes = compare_sweeps(read_results(before), read_results(after), min_change=min_change / 100)
    moved = [change for change in changes if change.verdict in ("better", "worse")]
    if as_json:
        click.echo(json.dumps({"changes": [to_json(change) for change in changes]}))
    else:
        for change in moved:
            click.echo(
                f"{change.verdict}: {change.config}, concurrency {change.concurrency}, {change.metric}: "
                f"{change.before:.4g} → {change.after:.4g} ({change.change:+.1%}, p {change.p_value:.3g})"
            )
        unknown = sum(change.verdict == "unknown" for change in changes)
        click.echo(f"{len(moved)} of {len(changes)} figures moved beyond noise")
        if unknown:
            click.echo(f"{unknown} cannot be judged: they have no repeats on one side (sweep --repeats 3)")
    if fail_on_regression and any(change.verdict == "worse" for change in moved):
        raise SystemExit(1)


def _refuse_without_effect(configs: str | None, load_generator: str, *, has_url: bool, has_predictions: bool) -> None:
    if not has_url:
        refuse_given(
            ("model", "tokenizer", "gpus", "load_generator", "aiperf_command"),
            "without --url (a configuration in a YAML file has keys of these names)",
        )
    if load_generator != "aiperf":
        refuse_given(("aiperf_command",), "without --load-generator aiperf")
    if not has_predictions:
        refuse_given(("cycle_table",), "without --predict")
    if configs is not None and configs.endswith((".yaml", ".yml")):
        refuse_given(("engines",), "beside a YAML file: name the directory there, as the key engines")


def _warn_of_queues(in_process: list[Configuration], concurrencies: Sequence[int]) -> None:
    """Before anything is measured; results.json says it again."""
    from trtllm_dflash.bench.capacity import by_label, queueing_warning
    from trtllm_dflash.engine.directory import open_engine_directory

    texts = []
    for one in in_process:
        assert one.engines is not None
        slots = open_engine_directory(one.engines, verify=False).limits.max_batch_size
        texts.append((one.label, queueing_warning({"max_batch_size": slots}, concurrencies)))
    for line in by_label(texts):
        click.echo(f"warning: {line}", err=True)


def _configurations(
    engines: tuple[Path, ...],
    configs: str | None,
    urls: tuple[str, ...],
    labels: tuple[str, ...],
    tokenizer: Path | None,
    shared: dict[str, Any],
) -> list[Configuration]:
    from trtllm_dflash.bench.configuration import Configuration
    from trtllm_dflash.bench.sweep_configs import (
        check_labels,
        configurations_from_shorthands,
        configurations_from_yaml,
    )

    if len(labels) > len(urls):
        raise click.UsageError(f"{len(labels)} --label for {len(urls)} --url: each names one")
    found: list[Configuration] = []
    if configs is not None and configs.endswith((".yaml", ".yml")):
        found += configurations_from_yaml(Path(configs))
    elif engines:
        found += configurations_from_shorthands((configs or "plain,auto").split(","), engines)
    elif configs is not None:
        raise click.UsageError("--configs with shorthands needs --engines")
    folder = tokenizer or (engines[0] if engines else None)
    for number, url in enumerate(urls):
        name = labels[number] if number < len(labels) else url
        found.append(Configuration(name, url=url, tokenizer=folder, **shared))
    if not found:
        raise click.UsageError("nothing to measure: give --engines, --configs FILE.yaml or --url")
    return check_labels(found)


def _on_gpu(device: str | None) -> bool:
    if device is not None:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trtllm_dflash.bench.sweep_results import device_word

    unit = device_word(document)
    table = Table(title="★ on the frontier; ± 95 % confidence", title_justify="left")
    for heading in ("configuration", "conc.", "tok/s user", f"tok/s {unit}", "TTFT p95 ms", "ITL p95 ms", "accept."):
        table.add_column(heading, justify="left" if heading == "configuration" else "right", no_wrap=True)
    for point in document["points"]:
        acceptance = point["acceptance"]
        table.add_row(
            f"{point['config']}{' ★' if point['frontier'] else ''}",
            str(point["concurrency"]),
            _estimate(point["tok_s_user"]),
            _estimate(point["tok_s_gpu"]),
            f"{point['ttft_ms']['p95']['mean']:.0f}" if point["ttft_ms"] else "–",
            f"{point['itl_ms']['p95']['mean']:.0f}" if point["itl_ms"] else "–",
            f"{acceptance['acceptance_length']:.2f}" if acceptance else "–",
        )
    # A pipe has no width of its own: 80 columns would cut the table.
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for prediction in document["predictions"]:
        click.echo(f"predicted (not measured) {prediction['label']}: {prediction['assumptions']}")
        for point in prediction["points"]:
            rates = f"{point['tok_s_user']:8.1f} tok/s per user, {point['tok_s_gpu']:8.1f} tok/s per {unit}"
            click.echo(f"  concurrency {point['concurrency']:4.0f}: {rates}")
    if document.get("best"):
        best = document["best"]
        place = f"best: {best['config']} at concurrency {best['concurrency']}: " if best["found"] else ""
        click.echo(place + best["why"])
    for warning in document["warnings"]:
        click.echo(f"warning: {warning}", err=True)


def _estimate(value: dict[str, float | None] | None) -> str:
    if value is None:
        return "–"
    return f"{value['mean']:.1f}" + (f" ±{value['ci95']:.1f}" if value["ci95"] is not None else "")


def _command() -> str:
    """The command as it was typed, less the folders of this machine: a report is made to be passed on."""
    return shlex.join(["trtllm-dflash", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])])

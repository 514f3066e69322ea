"""From the runs of a sweep to its points: means, confidence intervals, frontier, warnings.

docs/benchmarking.md describes the document for its readers.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.capacity import by_label, cut_warning, left_out_warning, queueing_warning
from trtllm_dflash.bench.machine import Steadiness, noise_warnings
from trtllm_dflash.bench.measurement import kept_shares
from trtllm_dflash.bench.sweep_journal import RunRecord, written_whole
from trtllm_dflash.errors import ConfigError

SCHEMA_VERSION = 1
LEAST_REPEATS = 3
_RATES = ("tok_s", "tok_s_user", "tok_s_gpu", "requests_s", "joules_per_token")
_LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
_SHARES = ("mean", "p50", "p95", "p99")


def make_results(
    runs: Sequence[RunRecord],
    method: Mapping[str, object],
    machine: Mapping[str, object],
    *,
    labels: Sequence[str],
    command: str,
) -> dict[str, Any]:
    """The document of ``results.json``.

    Args:
        runs: of the plan. method, machine: their facts. labels: configurations in the order of the plan.
        command: how to make it again.
    """
    points = [
        _point(label, users, [run for run in runs if (run.key.label, run.key.concurrency) == (label, users)])
        for label in labels
        for users in sorted({run.key.concurrency for run in runs if run.key.label == label})
    ]
    mark_frontier(points)
    facts = {run.key.label: (run.facts, run.fingerprint) for run in runs}
    return {
        "kind": "sweep",
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": dict(machine),
        "method": dict(method),
        "configurations": [
            {"label": label, "facts": facts[label][0], "sha256": facts[label][1]} for label in labels if label in facts
        ],
        "points": points,
        "frontier": [
            {"config": point["config"], "concurrency": point["concurrency"]} for point in points if point["frontier"]
        ],
        "warnings": _warnings(runs, points, method),
        "runs": [_run_entry(run) for run in runs],
        "predictions": [],
    }


def mark_frontier(points: Sequence[dict[str, Any]]) -> None:
    """Set ``frontier`` of each point: none other has at least its tok/s per user and per GPU, and more of one."""
    places = [(_mean_of(point, "tok_s_user"), _mean_of(point, "tok_s_gpu")) for point in points]
    for point, (x, y) in zip(points, places, strict=True):
        point["frontier"] = not any(
            other_x >= x and other_y >= y and (other_x > x or other_y > y) for other_x, other_y in places
        )


def confidence_half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of the mean (Student's t); None for fewer than three values.

    Two would have one: 12.7 times their standard error, which says how little two values know and nothing else.
    """
    if len(values) < LEAST_REPEATS:
        return None
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def read_results(path: Path) -> dict[str, Any]:
    """Read ``results.json``, or that of a sweep's directory.

    Raises:
        ConfigError: it is not there, or not of this version.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}", hint="give the -o directory of a sweep"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != "sweep":
        raise ConfigError(f"{file}: is not the results.json of a sweep")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{file}: schema_version is {document.get('schema_version')!r}, expected {SCHEMA_VERSION}",
            hint="measure again with this version, or read it with the version that wrote it",
        )
    return document


def device_word(document: Mapping[str, Any]) -> str:
    """``CPU`` where every configuration ran on one, else ``GPU``: what rates are per."""
    devices = {configuration["facts"].get("device") for configuration in document["configurations"]}
    return "CPU" if devices == {"cpu"} else "GPU"


def write_results(document: Mapping[str, Any], folder: Path) -> None:
    """Write ``results.json`` and ``results.csv``, each in one step."""
    with written_whole(folder / "results.json") as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    rows = [_row(point) for point in document["points"]]
    with written_whole(folder / "results.csv") as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _point(label: str, concurrency: int, runs: Sequence[RunRecord]) -> dict[str, Any]:
    results = [run.result for run in runs]
    point: dict[str, Any] = {
        "config": label,
        "concurrency": concurrency,
        "repeats": len(runs),
        "requests": sum(result["requests"] for result in results),
        "errors": sum(result["errors"] for result in results),
        "gpus": results[0]["gpus"],
        "in_flight": statistics.fmean(result["in_flight"] for result in results),
        "prompt_tokens": _mean(result["prompt_tokens"] for result in results),
        "completion_tokens": _mean(result["completion_tokens"] for result in results),
    }
    for name in _RATES:
        point[name] = _estimate([result[name] for result in results])
    for name in _LATENCIES:
        samples = [result[name] for result in results]
        known = [sample for sample in samples if sample is not None]
        point[name] = (
            {share: _estimate([sample[share] for sample in known]) for share in _SHARES}
            if len(known) == len(samples)
            else None
        )
    point["acceptance"] = _pooled_acceptance([result["acceptance"] for result in results])
    digests = {result["outputs_sha256"] for result in results}
    point["outputs_sha256"] = digests.pop() if len(digests) == 1 else None
    return point


def _pooled_acceptance(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    cycles = sum(part["cycles"] for part in known)
    accepted = sum(part["accepted"] for part in known)
    histograms = [part["histogram"] for part in known]
    pooled: list[int] | None = None
    if all(histograms):
        longest = max(map(len, histograms))
        pooled = [sum(histogram[kept] for histogram in histograms if kept < len(histogram)) for kept in range(longest)]
    return {
        "acceptance_length": (accepted + cycles) / cycles,
        "acceptance_length_per_request": statistics.fmean(part["acceptance_length_per_request"] for part in known),
        "cycles": cycles,
        "accepted": accepted,
        "histogram": pooled,
        "per_position": list(kept_shares(pooled)) if pooled else None,
    }


def _warnings(runs: Sequence[RunRecord], points: Sequence[dict[str, Any]], method: Mapping[str, Any]) -> list[str]:
    spreads = [
        (f"{point['config']}, concurrency {point['concurrency']}", spread)
        for point in points
        if (spread := _relative_spread(point, runs)) is not None
    ]
    warnings = noise_warnings([Steadiness(**run.probe) for run in runs], spreads)
    if any(point["repeats"] < LEAST_REPEATS for point in points):
        warnings.append(
            f"some points were run less than {LEAST_REPEATS} times: they have no confidence interval "
            f"(--repeats {LEAST_REPEATS} or more)"
        )
    errors = sum(point["errors"] for point in points)
    if errors:
        warnings.append(
            f"{errors} requests failed; they are left out of latencies. The same command measures their runs again"
        )
    workload: Any = method["workload"]
    forced = workload["forced_acceptance_length"]
    if forced is not None:
        warnings.append(
            f"acceptance was forced to {forced} tokens a cycle (bonus counted): the outputs are not the model's"
        )
    elif workload["sampling"]["temperature"] == 0:
        # An OpenAI stream has text only, whose digest is never that of token ids.
        texts = {run.key.label for run in runs if run.facts.get("api") == "openai"}
        warnings += _differing_outputs([point for point in points if point["config"] not in texts])
    most = max((point["requests"] // point["repeats"] for point in points), default=0)
    if most > workload["prompts"]:
        warnings.append(f"there are {workload['prompts']} prompts for {most} requests a run: some were sent repeatedly")
    return warnings + _capacity_warnings(runs)


def _relative_spread(point: Mapping[str, Any], runs: Sequence[RunRecord]) -> float | None:
    """Half-width of the confidence interval of tok/s over its mean, or of the range where there is no interval."""
    estimate = point["tok_s"]
    if estimate is None or point["repeats"] < 2:
        return None
    if estimate["ci95"] is not None:
        return float(estimate["ci95"] / estimate["mean"])
    place = (point["config"], point["concurrency"])
    values = [run.result["tok_s"] for run in runs if (run.key.label, run.key.concurrency) == place]
    return float((max(values) - min(values)) / 2 / estimate["mean"])


def _capacity_warnings(runs: Sequence[RunRecord]) -> list[str]:
    """What each configuration was asked for beyond its slots, its queue and its sequences."""
    texts: list[tuple[str, str | None]] = []
    for label in dict.fromkeys(run.key.label for run in runs):
        own = [run for run in runs if run.key.label == label]
        facts = own[-1].facts
        cut, requests = sum(run.result.get("cut_short", 0) for run in own), sum(run.result["requests"] for run in own)
        texts += [
            (label, queueing_warning(facts, [run.key.concurrency for run in own])),
            (label, left_out_warning(facts)),
            (label, cut_warning(cut, requests)),
        ]
    return by_label(texts)


def _differing_outputs(points: Sequence[dict[str, Any]]) -> list[str]:
    differing = []
    for users in sorted({point["concurrency"] for point in points}):
        digests = {point["outputs_sha256"] for point in points if point["concurrency"] == users}
        if len(digests) > 1 or None in digests:
            differing.append(users)
    if not differing:
        return []
    listed = ", ".join(map(str, differing))
    return [
        f"greedy outputs were not all identical at concurrency {listed}: in low precision, ties between the two best "
        "logits break differently in differently shaped passes"
    ]


def _run_entry(run: RunRecord) -> dict[str, Any]:
    return {
        "config": run.key.label,
        "concurrency": run.key.concurrency,
        "repeat": run.key.repeat,
        "at": run.at,
        "result": run.result,
        "probe": run.probe,
    }


def _row(point: Mapping[str, Any]) -> dict[str, Any]:
    row = {
        key: point[key]
        for key in ("config", "concurrency", "frontier", "repeats", "requests", "errors", "gpus", "in_flight")
    }
    for name in _RATES:
        value = point[name]
        row[name] = value["mean"] if value else None
        row[f"{name}_ci95"] = value["ci95"] if value else None
    for name in _LATENCIES:
        for share in _SHARES:
            row[f"{name}_{share}"] = point[name][share]["mean"] if point[name] else None
    acceptance = point["acceptance"] or {}
    row["acceptance_length"] = acceptance.get("acceptance_length")
    row["acceptance_length_per_request"] = acceptance.get("acceptance_length_per_request")
    return row


def _estimate(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known or len(known) != len(values):
        return None
    return {"mean": statistics.fmean(known), "ci95": confidence_half_width(known)}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_of(point: Mapping[str, Any], name: str) -> float:
    value = point[name]
    return float(value["mean"]) if value else 0.0

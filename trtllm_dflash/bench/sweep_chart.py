"""The Pareto chart as SVG and PNG (matplotlib, extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.sweep_journal import written_whole
from trtllm_dflash.bench.sweep_results import device_word
from trtllm_dflash.errors import ConfigError

# Okabe and Ito's palette: told apart by colour-blind readers too, and by marker in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
_MARKERS = "osD^vPX*"


def draw_chart(document: Mapping[str, Any], folder: Path) -> None:
    """Write ``pareto.svg`` and ``pareto.png`` of a results document into ``folder``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib", hint='pip install "trtllm-dflash[bench]"') from error
    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, configuration in enumerate(document["configurations"]):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        _curve(axes, configuration["label"], document["points"], style)
    for number, prediction in enumerate(document["predictions"]):
        colour = COLOURS[(len(document["configurations"]) + number) % len(COLOURS)]
        points = [(p["tok_s_user"], p["tok_s_gpu"]) for p in prediction["points"]]
        axes.plot(*zip(*points, strict=True), "--", color=colour, lw=1.3, label=f"{prediction['label']} (predicted)")
    frontier = sorted(_place(point) for point in document["points"] if point["frontier"])
    if frontier:
        axes.plot(*zip(*frontier, strict=True), color="black", lw=4, alpha=0.15, zorder=0, label="frontier")
    forced = document["method"]["workload"]["forced_acceptance_length"]
    unit = device_word(document)
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel(f"tokens/s per {unit}")
    title = f"Throughput against interactivity, {document['method']['workload']['dataset']}"
    axes.set_title(title if forced is None else f"{title}\nacceptance length forced to {forced}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)
    with written_whole(folder / "pareto.svg") as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
    with written_whole(folder / "pareto.png") as partial:
        figure.savefig(partial, format="png", dpi=150)


def _curve(axes: Any, label: str, points: list[dict[str, Any]], style: Mapping[str, Any]) -> None:
    mine = [point for point in points if point["config"] == label and point["tok_s_user"]]
    if not mine:
        return
    xs, ys = zip(*map(_place, mine), strict=True)
    errors = [[point[name]["ci95"] or 0.0 for point in mine] for name in ("tok_s_user", "tok_s_gpu")]
    axes.errorbar(xs, ys, xerr=errors[0], yerr=errors[1], lw=1.6, ms=5, elinewidth=0.8, capsize=2, label=label, **style)
    for point, x, y in zip(mine, xs, ys, strict=True):
        note = str(point["concurrency"])
        axes.annotate(note, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8, color=style["color"])


def _place(point: Mapping[str, Any]) -> tuple[float, float]:
    return (point["tok_s_user"] or {"mean": 0.0})["mean"], point["tok_s_gpu"]["mean"]

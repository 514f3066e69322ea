"""The Pareto chart as SVG and PNG (matplotlib, extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_dflash.bench.label_places import place_labels
from trtllm_dflash.bench.sweep_journal import written_whole
from trtllm_dflash.bench.sweep_results import device_word
from trtllm_dflash.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers too, and by marker in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
_MARKERS = "osD^vPX*"
_MARKER_POINTS, _LABEL_POINTS = 5.5, 8.5
# Largest over smallest value of an axis beyond which it is logarithmic (report_page.html has the same).
WIDE = 10


def draw_chart(document: Mapping[str, Any], folder: Path) -> None:
    """Write ``pareto.svg`` and ``pareto.png`` of a results document into ``folder``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = pareto_figure(document)
    with written_whole(folder / "pareto.svg") as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
    with written_whole(folder / "pareto.png") as partial:
        figure.savefig(partial, format="png", dpi=150)


def pareto_figure(document: Mapping[str, Any]) -> Figure:
    """The chart as a matplotlib figure: tok/s per GPU against tok/s per user, a curve for each configuration.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib", hint='pip install "trtllm-dflash[bench]"') from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    curves = _curves(document)
    predicted = [
        (prediction, [(p["tok_s_user"], p["tok_s_gpu"]) for p in prediction["points"]])
        for prediction in document["predictions"]
    ]
    everything = [place for _, places in (*curves, *predicted) for place in places]
    limits = [_scale(axes, name, [place[number] for place in everything]) for number, name in enumerate("xy")]
    for number, (points, places) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        _whiskers(axes, points, limits, colour)
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(
            *zip(*places, strict=True),
            lw=1.6,
            ms=_MARKER_POINTS,
            label=points[0]["config"],
            color=colour,
            marker=marker,
        )
    for number, (prediction, places) in enumerate(predicted):
        colour = COLOURS[(len(document["configurations"]) + number) % len(COLOURS)]
        axes.plot(*zip(*places, strict=True), "--", color=colour, lw=1.3, label=f"{prediction['label']} (predicted)")
    frontier = sorted(_place(point) for point in document["points"] if point["frontier"])
    if frontier:
        axes.plot(*zip(*frontier, strict=True), color="black", lw=7, alpha=0.12, zorder=0, label="frontier")
    _describe(figure, axes, document)
    _number(figure, axes, curves, [places for _, places in predicted])
    return figure


def is_wide(values: Sequence[float]) -> bool:
    """Whether values span so much that a linear axis would press most of them into a corner."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > WIDE * min(positive)


def _curves(document: Mapping[str, Any]) -> list[tuple[list[dict[str, Any]], list[tuple[float, float]]]]:
    """(points, places) of each configuration that has any."""
    curves = []
    for configuration in document["configurations"]:
        points = [p for p in document["points"] if p["config"] == configuration["label"] and p["tok_s_user"]]
        if points:
            curves.append((points, [_place(point) for point in points]))
    return curves


def _scale(axes: Any, name: str, values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis, logarithmic where points span much. Uncertainty may not shrink the picture."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    logarithmic = is_wide(values)
    highest = max(values, default=1.0) or 1.0
    low, high = (min(v for v in values if v > 0) / 1.3, highest * 1.4) if logarithmic else (0.0, highest * 1.1)
    axis = axes.xaxis if name == "x" else axes.yaxis
    if logarithmic:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    return low, high


def _whiskers(
    axes: Any, points: Sequence[Mapping[str, Any]], limits: Sequence[tuple[float, float]], colour: str
) -> None:
    """Confidence intervals, cut where the chart ends."""
    for point in points:
        x, y = _place(point)
        for along, name, middle in ((0, "tok_s_user", x), (1, "tok_s_gpu", y)):
            half = point[name]["ci95"]
            if half is None:
                continue
            low, high = limits[along]
            ends = [max(low, middle - half), min(high, middle + half)]
            places = (ends, [y, y]) if along == 0 else ([x, x], ends)
            axes.plot(*places, color=colour, lw=0.9, alpha=0.45, solid_capstyle="butt")


def _describe(figure: Any, axes: Any, document: Mapping[str, Any]) -> None:
    forced = document["method"]["workload"]["forced_acceptance_length"]
    axes.set_xlabel("tokens/s per user" + _scale_word(axes.get_xscale()))
    axes.set_ylabel(f"tokens/s per {device_word(document)}" + _scale_word(axes.get_yscale()))
    title = f"Throughput against interactivity, {document['method']['workload']['dataset']}"
    axes.set_title(title if forced is None else f"{title}\nacceptance length forced to {forced}", fontsize=11)
    axes.grid(alpha=0.3)
    # Outside: curves and their numbers have the whole chart.
    names = axes.get_legend_handles_labels()[1]
    columns = max(1, min(len(names), 120 // (max(map(len, names), default=0) + 8)))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def _scale_word(scale: str) -> str:
    return " (logarithmic)" if scale == "log" else ""


def _number(
    figure: Any,
    axes: Any,
    curves: Sequence[tuple[list[dict[str, Any]], list[tuple[float, float]]]],
    predicted: Sequence[Sequence[tuple[float, float]]],
) -> None:
    """Write concurrencies beside points, as many as find room."""
    # Places in pixels are known when the layout is.
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / 72
    on_screen, predicted_on_screen = (
        [[tuple(place) for place in axes.transData.transform(places)] for places in some]
        for some in ([places for _, places in curves], predicted)
    )
    texts = [[str(point["concurrency"]) for point in points] for points, _ in curves]
    height = _LABEL_POINTS * pixels_per_point
    # Digits of the chart's font are 0.64 of its size wide.
    sizes = [[(0.64 * height * len(text), height) for text in own] for own in texts]
    found = place_labels(
        on_screen,
        sizes,
        marker=_MARKER_POINTS * pixels_per_point / 2,
        bounds=axes.get_window_extent().extents,
        other_lines=predicted_on_screen,
    )
    to_data = axes.transData.inverted()
    for number, (own, middles) in enumerate(zip(texts, found, strict=True)):
        for text, middle in zip(own, middles, strict=True):
            if middle is not None:
                style = {"fontsize": _LABEL_POINTS, "color": COLOURS[number % len(COLOURS)]}
                axes.text(*to_data.transform(middle), text, ha="center", va="center", **style)


def _place(point: Mapping[str, Any]) -> tuple[float, float]:
    return (point["tok_s_user"] or {"mean": 0.0})["mean"], point["tok_s_gpu"]["mean"]

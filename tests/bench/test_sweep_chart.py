"""The chart: its axes follow the points, and the numbers beside them can be read."""

from __future__ import annotations

import itertools
import random

import pytest
from sweep_documents import document, result, run

from trtllm_dflash.bench.label_places import place_labels
from trtllm_dflash.bench.sweep_chart import pareto_figure


def _document(rates: dict[int, tuple[float, float]], *, noise: float = 0.0) -> dict:
    """tok/s in all and per user by concurrency, with repeats that differ by +- noise."""
    return document(
        [
            run("fast", users, repeat, result(total * shift, user * shift))
            for users, (total, user) in rates.items()
            for repeat, shift in enumerate((1 - noise, 1.0, 1 + noise))
        ]
    )


def test_axes_follow_the_points_whatever_the_uncertainty() -> None:
    rates = {1: (90.0, 100.0), 8: (300.0, 45.0)}
    for noise in (0.01, 0.9):
        (axes,) = pareto_figure(_document(rates, noise=noise)).axes
        assert axes.get_xlim() == pytest.approx((0, 110))
        assert axes.get_ylim() == pytest.approx((0, 330))
        whiskers = [line for line in axes.get_lines() if len(line.get_xdata()) == 2 and line.get_alpha() == 0.45]
        assert len(whiskers) == 4
        for line in whiskers:
            assert min(line.get_ydata()) >= 0
            assert max(line.get_xdata()) <= axes.get_xlim()[1]


def test_an_axis_that_spans_much_is_logarithmic() -> None:
    (axes,) = pareto_figure(_document({1: (900.0, 5000.0), 8: (2000.0, 400.0), 256: (5000.0, 40.0)})).axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel().endswith("(logarithmic)")
    assert axes.get_xlim()[0] < 40 < 5000 < axes.get_xlim()[1]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0


def test_every_point_of_a_calm_chart_has_its_number() -> None:
    (axes,) = pareto_figure(_document({users: (100.0 * users**0.5, 100.0 / users) for users in (1, 2, 4, 8, 16)})).axes
    assert sorted(int(text.get_text()) for text in axes.texts) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("seed", range(5))
def test_labels_of_a_crowd_lie_on_no_label_and_no_point(seed: int) -> None:
    draw = random.Random(seed)
    curves = [[(draw.gauss(200, 30), draw.gauss(200, 30)) for _ in range(9)] for _ in range(3)]
    sizes = [[(20.0, 11.0)] * 9 for _ in curves]
    bounds = (0.0, 0.0, 400.0, 400.0)
    places = place_labels(curves, sizes, marker=4, bounds=bounds)
    boxes = [(x - 10, y - 5.5, x + 10, y + 5.5) for own in places for place in own if place for x, y in [place]]
    assert len(boxes) >= 9
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for x, y in itertools.chain(*curves):
        assert not any(a[0] < x < a[2] and a[1] < y < a[3] for a in boxes)


def test_a_label_keeps_off_the_lines_where_it_can() -> None:
    # The first place, up and to the right, is where the curve goes.
    ((first, _),) = place_labels(
        [[(100.0, 100.0), (200.0, 160.0)]], [[(20.0, 11.0)] * 2], marker=4, bounds=(0, 0, 400, 400)
    )
    assert first is not None
    assert not (first[0] > 100 and first[1] > 100)

"""Where the numbers beside a chart's points go, so that none lies on another or on a point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Place = tuple[float, float]
# Left, bottom, right, top.
Box = tuple[float, float, float, float]
# Directions of a label's middle from its point, the most readable first.
_DIRECTIONS = ((1, 1), (1, 0), (-1, 1), (1, -1), (0, 1), (-1, 0), (0, -1), (-1, -1))


def place_labels(
    curves: Sequence[Sequence[Place]],
    sizes: Sequence[Sequence[Place]],
    *,
    marker: float,
    bounds: Box,
    other_lines: Sequence[Sequence[Place]] = (),
) -> list[list[Place | None]]:
    """Middle of each point's label, in the units of the arguments; None where no place is free.

    The ends of every curve are placed first, so that what a crowd leaves without a number is in between.

    Args:
        curves: points of each curve, in order. sizes: width and height of each label.
        marker: half the width of a point's mark. bounds: of the chart.
        other_lines: lines without numbers, which labels keep off where they can.
    """
    marks = [(x - marker, y - marker, x + marker, y + marker) for curve in curves for x, y in curve]
    lines = [pair for curve in (*curves, *other_lines) for pair in itertools.pairwise(curve)]
    placed: list[list[Place | None]] = [[None] * len(curve) for curve in curves]
    labels: list[Box] = []
    for curve, point in sorted(
        ((curve, point) for curve, points in enumerate(curves) for point in range(len(points))),
        key=lambda place: (0 < place[1] < len(curves[place[0]]) - 1, place),
    ):
        size = sizes[curve][point]
        middle = _free_place(curves[curve][point], size, marker, bounds, [*labels, *marks], lines)
        placed[curve][point] = middle
        if middle is not None:
            labels.append(_box(middle, size))
    return placed


def _free_place(
    point: Place,
    size: Place,
    marker: float,
    bounds: Box,
    obstacles: Sequence[Box],
    lines: Sequence[tuple[Place, Place]],
) -> Place | None:
    """The first free place around ``point``, preferably one that no curve runs through."""
    free = []
    for gap in (0.5 * marker, 2.5 * marker):
        for right, up in _DIRECTIONS:
            # Diagonal labels touch their point's mark with a corner and need no more room than that.
            middle = (
                point[0] + right * (marker + gap + size[0] / 2),
                point[1] + up * ((marker + gap if not right else 0.4 * marker + gap) + size[1] / 2),
            )
            box = _box(middle, size)
            if _within(box, bounds) and not any(_overlap(box, other) for other in obstacles):
                if not any(_crosses(box, *line) for line in lines):
                    return middle
                free.append(middle)
    return free[0] if free else None


def _box(middle: Place, size: Place) -> Box:
    return (middle[0] - size[0] / 2, middle[1] - size[1] / 2, middle[0] + size[0] / 2, middle[1] + size[1] / 2)


def _within(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _crosses(box: Box, start: Place, end: Place) -> bool:
    """Whether the line from ``start`` to ``end`` runs through ``box`` (Liang and Barsky's clipping)."""
    first, last = 0.0, 1.0
    for axis in (0, 1):
        step = end[axis] - start[axis]
        low, high = box[axis] - start[axis], box[axis + 2] - start[axis]
        if math.isclose(step, 0.0, abs_tol=1e-12):
            if low > 0 or high < 0:
                return False
            continue
        enters, leaves = sorted((low / step, high / step))
        first, last = max(first, enters), min(last, leaves)
    return first < last

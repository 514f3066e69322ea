"""Numbers that a float holds: JSON and Python know larger integers, which no model takes."""

from __future__ import annotations

import math
from numbers import Real


def is_finite(value: Real | float) -> bool:
    """Whether ``value`` is no NaN, not infinite, and an integer only where a float holds it."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

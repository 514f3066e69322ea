"""How long work tells its caller how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); bytes in all is 0 while unknown."""


def silent(label: str, done: int, total: int) -> None:
    """The progress of whoever does not want to know."""

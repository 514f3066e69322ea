"""Progress where stderr is no terminal (a log, CI, a container): plain lines, few enough to be read later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

# Work of less than this says nothing; then a line where something changed, and a sign of life where nothing did.
FIRST_S = 2.0
CHANGED_S = 5.0
UNCHANGED_S = 30.0
_LOOK_S = 0.5


class ProgressLines:
    """Takes progress calls from any thread and writes a line when one is due.

    Args:
        title: what is shown before the first call. in_bytes: counts are bytes. write: takes a line.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        title: str,
        *,
        in_bytes: bool = False,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_bytes, self._clock = in_bytes, clock
        self._write = write or (lambda line: click.echo(line, err=True))
        self._state = (title, 0, 0)
        self._written: tuple[str, int, int] | None = None
        self._began = self._written_at = clock()

    def __call__(self, label: str, done: int, total: int) -> None:
        # One assignment of one object: no lock is needed, and a call costs a measurement nothing.
        self._state = (label, done, total)

    def look(self) -> None:
        """Write a line if one is due."""
        now, state = self._clock(), self._state
        if self._written is None:
            is_due = now - self._began >= FIRST_S
        else:
            is_due = now - self._written_at >= (CHANGED_S if state != self._written else UNCHANGED_S)
        if is_due:
            self._written, self._written_at = state, now
            self._write(f"[{now - self._began:5.0f} s] {self._words(state)}")

    def _words(self, state: tuple[str, int, int]) -> str:
        label, done, total = state
        if not total:
            return label
        if self._in_bytes:
            return f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        return f"{label}: {done} of {total}"


@contextmanager
def progress_lines(title: str, *, in_bytes: bool = False) -> Iterator[ProgressLines]:
    """Lines on stderr about the work inside the block, also while it makes no progress call."""
    lines = ProgressLines(title, in_bytes=in_bytes)
    ended = threading.Event()

    def watch() -> None:
        # A reader that left, or a full disk under the log: the work goes on without its lines.
        with suppress(OSError, ValueError):
            while not ended.wait(_LOOK_S):
                lines.look()

    watcher = threading.Thread(target=watch, name="progress-lines", daemon=True)
    watcher.start()
    try:
        yield lines
    finally:
        ended.set()
        watcher.join()

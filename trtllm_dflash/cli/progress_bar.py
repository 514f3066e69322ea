"""One progress bar for everything that reports (label, done, in all); plain lines where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trtllm_dflash.checkpoint.progress import Progress as ProgressCallback
from trtllm_dflash.cli.progress_lines import progress_lines


class _Bar:
    """Maps labelled progress calls to one bar per label."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total or None)
        self._progress.update(self._tasks[label], completed=done, total=total or None)


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A bar of bytes for each label on stderr, or lines when stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines("starting", in_bytes=True) as lines:
            yield lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)


@contextmanager
def plan_progress(title: str) -> Iterator[ProgressCallback]:
    """Like :func:`progress_bar` for work that counts steps: one bar that names the phase it is in."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines(title) as lines:
            yield lines
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(title, total=None)

        def show(label: str, done: int, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total or None)

        yield show


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Something that takes a while and has no steps: a spinner, or lines when stderr is not a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(title):
            yield
    else:
        with progress_lines(title):
            yield

"""Progress in a log: rare lines, also while nothing reports."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench_program import REQUESTS, run_bench

from trtllm_dflash.cli import progress_lines
from trtllm_dflash.cli.progress_lines import ProgressLines


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _watched(report: Callable[[ProgressLines, int], None], seconds: int, *, in_bytes: bool = False) -> list[str]:
    """Lines that are written when ``report`` is called every second and somebody looks twice as often."""
    written: list[str] = []
    clock = _Clock()
    lines = ProgressLines("starting", in_bytes=in_bytes, write=written.append, clock=clock)
    for second in range(seconds):
        report(lines, second)
        for _ in range(2):
            clock.now += 0.5
            lines.look()
    return written


def test_short_work_says_nothing() -> None:
    assert _watched(lambda lines, second: lines("step", second, 9), 1) == []


def test_a_line_every_few_seconds_while_something_changes() -> None:
    written = _watched(lambda lines, second: lines("measured requests", second, 40), 20)
    assert written == [
        "[    2 s] measured requests: 1 of 40",
        "[    7 s] measured requests: 6 of 40",
        "[   12 s] measured requests: 11 of 40",
        "[   17 s] measured requests: 16 of 40",
    ]


def test_a_sign_of_life_while_nothing_changes() -> None:
    assert _watched(lambda lines, second: None, 70) == [
        "[    2 s] starting",
        "[   32 s] starting",
        "[   62 s] starting",
    ]


def test_bytes_are_megabytes() -> None:
    written = _watched(lambda lines, _: lines("converting", 120_400_000, 270_000_000), 3, in_bytes=True)
    assert written == ["[    2 s] converting: 120 of 270 MB"]


def test_lines_come_from_a_thread_of_their_own(capsys, monkeypatch) -> None:
    """Work that is inside one long call cannot look itself."""
    monkeypatch.setattr(progress_lines, "FIRST_S", 0.05)
    monkeypatch.setattr(progress_lines, "_LOOK_S", 0.01)
    with progress_lines.progress_lines("loading") as lines:
        lines("loading", 1, 2)
        time.sleep(0.3)
    printed = capsys.readouterr()
    assert printed.err == "[    0 s] loading: 1 of 2\n"
    assert printed.out == ""


def test_bench_without_a_terminal_shows_progress_and_keeps_stdout_clean(
    tiny_engines: Callable[..., Path], tmp_path: Path
) -> None:
    done = run_bench(tiny_engines("llama-v2"), tmp_path, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["requests"] == REQUESTS
    assert "] opening …" in done.stderr
    assert "measured requests: " in done.stderr

"""What the machine refuses is said as such: no traceback, no "fault of the toolkit", nothing half-written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_program import REQUESTS, run_bench

from trtllm_dflash.bench.sweep_journal import written_whole
from trtllm_dflash.cli.main import main
from trtllm_dflash.cli.os_errors import refusal_of


@pytest.mark.parametrize(
    ("code", "filename", "message", "hint", "exit_code"),
    [
        (errno.ENOSPC, None, "No space left on device", "free disk space", 1),
        (errno.EROFS, "/a/b", "/a/b: Read-only file system", "can be written to", 2),
        (errno.EACCES, b"/a/b", "/a/b: Permission denied", "permissions", 2),
        (errno.ENOENT, "/a/b", "/a/b: No such file or directory", "check the path", 2),
    ],
)
def test_a_refusal_names_the_file_and_the_step(
    code: int, filename: object, message: str, hint: str, exit_code: int
) -> None:
    error = OSError(code, os.strerror(code)) if filename is None else OSError(code, os.strerror(code), filename)
    refusal = refusal_of(error)
    assert refusal is not None
    assert (refusal.message, refusal.exit_code) == (message, exit_code)
    assert hint in refusal.hint


def test_what_no_path_explains_stays_a_fault() -> None:
    assert refusal_of(OSError("a library's own words")) is None
    assert refusal_of(OSError(errno.ENOTCONN, "Transport endpoint is not connected")) is None


def _ended(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code, capsys.readouterr().err


def test_a_log_file_in_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = _ended(capsys, "serve", "-m", tmp_path, "--log-file", tmp_path / "nowhere" / "log")
    assert code == 2
    assert f"error: {tmp_path / 'nowhere' / 'log'}: No such file or directory" in err
    assert "fault of the toolkit" not in err


def test_a_sweep_below_a_file(
    tiny_engines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    dataset, output = tmp_path / "d.jsonl", tmp_path / "out"
    dataset.write_text('{"prompt": "the an"}\n')
    output.write_text("mine")
    words = ("--dataset", dataset, "--concurrency", 1, "--device", "cpu", "--max-tokens", 8)
    code, err = _ended(capsys, "sweep", "-e", tiny_engines("llama-v2"), *words, "-o", output / "sweep")
    assert code == 2
    assert f"error: {output / 'sweep'}: Not a directory" in err
    assert output.read_text() == "mine"


def test_a_cycle_table_in_no_folder_leaves_nothing(
    tiny_engines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "d.jsonl"
    dataset.write_text('{"prompt": "the an"}\n')
    words = ("--dataset", dataset, "--device", "cpu", "--no-stages", "--max-tokens", 8, "--num-prompts", 1)
    table = tmp_path / "nowhere" / "table.json"
    code, err = _ended(capsys, "bench", "-e", tiny_engines("llama-v2"), *words, "--cycle-table", table)
    assert code == 2
    assert "No such file or directory" in err
    assert list(tmp_path.iterdir()) == [dataset]


def test_a_selfcheck_is_shown_even_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_dflash.bench import selfcheck

    counts = {"passed": 1, "failed": 0, "skipped": 0}
    document = {"verdict": "passed", "checks": [], "seconds": 600.0, "device": "cpu", **counts}
    monkeypatch.setattr(selfcheck, "run_selfcheck", lambda *arguments, **more: document)
    with pytest.raises(SystemExit) as ended:
        main(["selfcheck", "--json", "-o", str(tmp_path / "nowhere" / "s.json")])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert json.loads(printed.out) == document
    assert "s.json: No such file or directory" in printed.err


def test_a_file_that_cannot_be_written_whole_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def fill_the_disk() -> None:
        with written_whole(path) as partial:
            partial.write_text("ne")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        fill_the_disk()
    assert caught.value.filename == str(path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("results.json", "old")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_progress_onto_a_full_disk_does_not_end_the_work(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    before = "import threading\nfailed = []\nthreading.excepthook = lambda what: failed.append(what.exc_type.__name__)"
    with Path("/dev/full").open("w") as full:
        done = run_bench(tiny_engines("llama-v2"), tmp_path, stderr=full, before=before, after="print(failed)")
    document, failed = done.stdout.strip().splitlines()
    assert json.loads(document)["result"]["requests"] == REQUESTS
    assert failed == "[]"

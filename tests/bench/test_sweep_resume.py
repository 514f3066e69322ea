"""A sweep on a real (tiny) engine: its files, and what is left after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash import SamplingParams
from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.bench.machine import machine_facts
from trtllm_dflash.bench.sweep_journal import RunRecord, SweepJournal
from trtllm_dflash.bench.sweep_output import FILES, write_output
from trtllm_dflash.bench.sweep_plan import PointKey, SweepPlan
from trtllm_dflash.bench.sweep_results import make_results, read_results
from trtllm_dflash.bench.sweep_run import run_sweep
from trtllm_dflash.bench.workload import Workload, make_workload
from trtllm_dflash.errors import ConfigError


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the an {letter} in"}) + "\n" for letter in "abcdefghijkl"))
    return path


def _workload(dataset: Path, max_tokens: int = 12) -> Workload:
    return make_workload(dataset, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def _plan(engines: Path, **changes: Any) -> SweepPlan:
    configurations = (
        Configuration("plain", engines=engines, speculation="off"),
        Configuration("DFlash 2", engines=engines, speculation="on"),
    )
    settings: dict[str, Any] = {"repeats": 2, "requests_per_user": 2, "min_requests": 3, "device": "cpu", **changes}
    return SweepPlan(configurations, (1, 2), **settings)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_a_sweep_writes_all_its_files(tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "out"
    method, runs = run_sweep(_plan(tiny_engines("llama-v2"), max_open=1), _workload(dataset), folder)
    results = make_results(runs, method, machine_facts(), labels=["plain", "DFlash 2"], command="a command")
    assert [path.name for path in write_output(results, folder)] == list(FILES)
    assert read_results(folder) == json.loads(json.dumps(results))
    assert [(p["config"], p["concurrency"], p["repeats"]) for p in results["points"]] == [
        ("plain", 1, 2), ("plain", 2, 2), ("DFlash 2", 1, 2), ("DFlash 2", 2, 2),
    ]  # fmt: skip
    # Greedy in float32: the same prompts give the same outputs with and without speculation, every time.
    for users in (1, 2):
        digests = {p["outputs_sha256"] for p in results["points"] if p["concurrency"] == users}
        assert len(digests) == 1
        assert None not in digests
    assert (folder / "pareto.svg").read_text().startswith("<?xml")
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "results.csv").read_text().splitlines()) == 5
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert str(tmp_path) not in page + (folder / "results.json").read_text()


def test_after_kill_9_no_point_is_lost_and_none_is_measured_twice(
    tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    engines, folder = tiny_engines("llama-v2"), tmp_path / "out"
    command = [
        sys.executable, "-m", "trtllm_dflash", "sweep", "-e", str(engines), "--configs", "plain,dflash2",
        "--dataset", str(dataset), "--concurrency", "1,2", "--repeats", "3", "--requests-per-user", "2",
        "--min-requests", "3", "--max-tokens", "12", "--device", "cpu", "-o", str(folder),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "runs.jsonl").is_file() or (folder / "runs.jsonl").read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    kept = [line for line in (folder / "runs.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 4 <= len(kept) < 1 + 12
    plan = _plan(engines, repeats=3)
    _, runs = run_sweep(plan, _workload(dataset), folder)
    assert (folder / "runs.jsonl").read_bytes().startswith(b"".join(kept))
    measured = Counter((e["config"], e["concurrency"], e["repeat"]) for e in _lines(folder)[1:])
    assert len(measured) == len(runs) == 12
    assert set(measured.values()) == {1}


def test_a_torn_last_line_is_measured_again(tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path) -> None:
    plan, folder = _plan(tiny_engines("llama-v2"), repeats=1), tmp_path / "out"
    run_sweep(plan, _workload(dataset), folder)
    whole = (folder / "runs.jsonl").read_bytes()
    (folder / "runs.jsonl").write_bytes(whole[:-40])
    told: list[str] = []
    run_sweep(plan, _workload(dataset), folder, progress=lambda label, done, total: told.append(label))
    assert told == ["DFlash 2, concurrency 2"]
    assert len(_lines(folder)) == 5


def test_runs_with_failed_requests_are_measured_again(
    tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    """A server that refused for a while: its run is on disk, and the same command replaces it."""
    plan, folder = _plan(tiny_engines("llama-v2"), repeats=1), tmp_path / "out"
    run_sweep(plan, _workload(dataset), folder)
    header, *runs = _lines(folder)
    runs[1]["result"] |= {"errors": 2, "first_error": "HTTP 503"}
    (folder / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *runs)))
    told: list[str] = []
    _, again = run_sweep(plan, _workload(dataset), folder, progress=lambda label, done, total: told.append(label))
    assert told == [f"{runs[1]['config']}, concurrency {runs[1]['concurrency']}"]
    assert [run.result["errors"] for run in again] == [0, 0, 0, 0]
    assert len(_lines(folder)) == 6
    # Nothing is left to measure, for a reader of the file alone too.
    run_sweep(plan, _workload(dataset), folder, progress=lambda label, done, total: told.append(label))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("7", "got int, expected an object"), ('{"kind": "run"}', "a run without 'repeat'"), ("{", "not JSON")],
)
def test_a_damaged_journal_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with SweepJournal(tmp_path, {}, "a"):
        pass
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=rf"line 2: {message}"):
        SweepJournal(tmp_path, {}, "a")


def test_a_finished_sweep_can_be_widened(tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path) -> None:
    engines, folder = tiny_engines("llama-v2"), tmp_path / "out"
    run_sweep(_plan(engines, repeats=1), _workload(dataset), folder)
    told: list[str] = []
    _, runs = run_sweep(
        _plan(engines, repeats=2), _workload(dataset), folder, progress=lambda label, done, total: told.append(label)
    )
    assert len(told) == 4
    assert len(runs) == 8


def test_other_prompts_or_another_engine_are_not_mixed_in(
    tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    run_sweep(_plan(tiny_engines("llama-v2"), repeats=1), _workload(dataset), folder)
    with pytest.raises(ConfigError, match="other prompts, sampling or requests"):
        run_sweep(_plan(tiny_engines("llama-v2"), repeats=1), _workload(dataset, max_tokens=13), folder)
    with pytest.raises(ConfigError, match="'plain' with another engine"):
        run_sweep(_plan(tiny_engines("qwen3-v2"), repeats=1), _workload(dataset), folder)


def test_a_disk_that_fills_up_loses_the_run_in_progress_alone(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    run = RunRecord(PointKey(0, 1, "a"), "f", {}, {"errors": 0, "text": "x" * 3000}, {}, "now")
    with SweepJournal(tmp_path, {}, "a") as journal:
        journal.add(run)
    file = tmp_path / "runs.jsonl"
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails instead
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, limits[1]))
        with pytest.raises(OSError, match="too large") as caught, SweepJournal(tmp_path, {}, "a") as journal:
            journal.add(replace(run, key=PointKey(1, 1, "a")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename == str(file)
    assert file.read_bytes().startswith(before)
    with SweepJournal(tmp_path, {}, "a") as journal:
        assert [one.key.repeat for one in journal.runs] == [0]
    assert file.read_bytes() == before


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with SweepJournal(tmp_path, {}, "a"), pytest.raises(ConfigError, match="another sweep is running"):
        SweepJournal(tmp_path, {}, "a")

"""A sweep that is killed with SIGKILL in the middle and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

KILL_AFTER = 5


def resume_figures(engines: Path, prompts: Path, folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``resume_lost``: finished runs that were not there afterwards; ``resume_twice``: runs measured more than once."""
    command = [
        sys.executable, "-m", "trtllm_dflash", "sweep", "-e", str(engines), "--configs", "plain,dflash2",
        "--dataset", str(prompts), "--num-prompts", "16", "--concurrency", "1,2", "--repeats", "3", "--device", device,
        "--requests-per-user", "2", "--min-requests", "2", "--max-tokens", "16", "-o", str(folder),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = folder / "runs.jsonl"
    try:
        while not journal.is_file() or journal.read_bytes().count(b"\n") < 1 + KILL_AFTER:
            if process.poll() is not None:
                raise RuntimeError(f"the sweep ended with {process.returncode} before it could be killed")
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    before = _runs(journal)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = _runs(journal)
    figures = {
        "resume_lost": sum((Counter(before) - Counter(after)).values()),
        "resume_twice": sum(count - 1 for count in Counter(key for key, _ in after).values()),
    }
    return figures, {"finished_before_the_kill": len(before), "finished_in_all": len(after)}


def _runs(journal: Path) -> list[tuple[str, str]]:
    """(which run, its line) of every whole line but the header."""
    lines = [line for line in journal.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    entries = [json.loads(line) for line in lines]
    return [
        (f"{entry['config']} {entry['concurrency']} {entry['repeat']}", line)
        for entry, line in zip(entries, lines, strict=True)
    ]

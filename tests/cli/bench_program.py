"""``bench`` in a process of its own whose lines of progress do not wait for the clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

REQUESTS = 24


def run_bench(
    engines: Path, folder: Path, *, stderr: int | IO[str], before: str = "", after: str = "pass"
) -> subprocess.CompletedProcess[str]:
    """Run ``bench --json`` with ``REQUESTS`` requests; ``before`` and ``after`` are statements around it."""
    dataset = folder / "prompts.jsonl"
    dataset.write_text('{"prompt": "the an in"}\n')
    code = (
        f"{before}\n"
        "from trtllm_dflash.cli import progress_lines\n"
        "progress_lines.FIRST_S = progress_lines.CHANGED_S = 0.0\n"
        "progress_lines._LOOK_S = 0.005\n"
        "from trtllm_dflash.cli.main import main\n"
        "try: main()\n"
        f"finally: {after}"
    )
    words = ["bench", "-e", str(engines), "--dataset", str(dataset), "--device", "cpu", "--json"]
    words += ["--num-prompts", str(REQUESTS), "--max-tokens", "40", "--no-stages"]
    return subprocess.run([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=stderr, text=True)

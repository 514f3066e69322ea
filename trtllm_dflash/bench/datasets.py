"""Evaluation prompts from JSON lines in the public formats, as chat messages.

Prompt texts and order are the reference benchmark's (PyPI ``dflash`` 0.1.0): rows are shuffled with
``random.Random(42)``, then the first N are taken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import ConfigError

_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_SHUFFLE_SEED = 42

_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "question": lambda row: f"{row['question']}\n{_REASON}",
    "prompt": lambda row: (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
        if "entry_point" in row
        else str(row["prompt"])
    ),
    "turns": lambda row: str(row["turns"][0]),
}


def load_prompts(path: str | Path, count: int | None = None) -> list[list[dict[str, str]]]:
    """The first ``count`` prompts of a data set, each as chat messages with one user turn.

    Args:
        path: JSON lines with ``question`` (GSM8K), ``prompt`` and ``entry_point`` (HumanEval), ``prompt`` alone (any
            prompts file) or ``turns`` (MT-bench).
        count: None takes all.

    Raises:
        ConfigError: by file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file}: no such data set", hint="give a JSON lines file")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            rows.append(_text(line, f"{file}, line {number}"))
    random.Random(_SHUFFLE_SEED).shuffle(rows)
    return [[{"role": "user", "content": text}] for text in rows[:count]]


def _text(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    for key, text in _TEXTS.items():
        if isinstance(row, dict) and key in row:
            return text(row)
    raise ConfigError(f"{place}: expected a key question, prompt or turns")

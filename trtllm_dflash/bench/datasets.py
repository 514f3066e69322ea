"""Evaluation prompts from JSON lines in the public formats, as chat messages.

Prompt texts and order are the reference benchmark's (PyPI ``dflash`` 0.1.0): rows are shuffled with
``random.Random(42)``, then the first N are taken.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.config.chat_messages import text_messages
from trtllm_dflash.config.json_lines import read_json_lines
from trtllm_dflash.errors import ConfigError, RequestError

Messages = list[dict[str, str]]

_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_SHUFFLE_SEED = 42


def _instruction(row: dict[str, Any]) -> str:
    """HumanEval's prompt is code to complete; anything else called ``prompt`` (MBPP, a prompts file) is said as is."""
    if "entry_point" in row:
        return (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        )
    return str(row["prompt"])


# In this order: a MATH-500 row has problem and answer, an MBPP row text (or prompt), code and test_list.
_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "question": lambda row: f"{row['question']}\n{_REASON}",
    "problem": lambda row: f"{row['problem']}\n{_REASON}",
    "prompt": _instruction,
    "turns": lambda row: str(row["turns"][0]),
    "text": lambda row: str(row["text"]),
}


def load_prompts(path: str | Path, count: int | None = None) -> list[Messages]:
    """The first ``count`` prompts of a data set, each as chat messages.

    Args:
        path: JSON lines with ``messages`` (a chat, as it is), ``question`` (GSM8K), ``problem`` (MATH-500), ``prompt``
            and ``entry_point`` (HumanEval), ``prompt`` alone (MBPP sanitized, any prompts file), ``turns`` (MT-bench,
            its first turn) or ``text`` (MBPP, any texts).
        count: None takes all.

    Raises:
        ConfigError: by file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file}: no such data set", hint="give a JSON lines file")
    rows = [_messages(row, place) for place, row in read_json_lines(file)]
    random.Random(_SHUFFLE_SEED).shuffle(rows)
    return rows[:count]


def prompts_fingerprint(prompts: Sequence[object]) -> str:
    """SHA-256 of prompts (messages, text or token ids) and their order, hexadecimal: which prompts, without them."""
    return hashlib.sha256(json.dumps(list(prompts), ensure_ascii=False).encode()).hexdigest()


def _messages(row: dict[str, Any], place: str) -> Messages:
    if "messages" in row:
        return _chat(row["messages"], place)
    for key, text in _TEXTS.items():
        if key in row:
            if key == "turns" and not (isinstance(row[key], list) and row[key]):
                raise ConfigError(f"{place}: turns is empty, expected a list of texts")
            return [{"role": "user", "content": text(row)}]
    raise ConfigError(f"{place}: expected a key messages, {', '.join(list(_TEXTS)[:-1])} or {list(_TEXTS)[-1]}")


def _chat(messages: object, place: str) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: messages is {type(messages).__name__}, expected a list with at least one message")
    try:
        turns = text_messages(messages, "messages")
    except RequestError as problem:
        raise ConfigError(f"{place}: {problem.message}") from None
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]

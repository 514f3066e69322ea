"""Data sets in their public formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.bench.datasets import load_prompts, prompts_fingerprint
from trtllm_dflash.errors import ConfigError


def _file(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.mark.parametrize(
    ("row", "start"),
    [
        ({"question": "How many?", "answer": "2"}, "How many?\nPlease reason"),
        ({"problem": "Find x.", "answer": "2", "subject": "Algebra"}, "Find x.\nPlease reason"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}, "Write a solution"),
        ({"task_id": 2, "prompt": "Write a sum.", "code": "", "test_list": []}, "Write a sum."),
        ({"task_id": 2, "text": "Write a sum.", "code": "", "test_list": []}, "Write a sum."),
        ({"question_id": 81, "category": "writing", "turns": ["First.", "Second."]}, "First."),
    ],
)
def test_a_public_format_becomes_one_user_turn(tmp_path: Path, row: dict[str, Any], start: str) -> None:
    (messages,) = load_prompts(_file(tmp_path, row))
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].startswith(start)


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert load_prompts(_file(tmp_path, {"messages": chat, "prompt": "ignored"})) == [chat]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "expected a JSON object"),
        ({"answer": "2"}, "expected a key messages, question"),
        ({"turns": []}, "turns is empty"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl") as caught:
        load_prompts(_file(tmp_path, row))
    assert words in caught.value.message


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(_file(tmp_path))


def test_fingerprint_knows_order() -> None:
    assert prompts_fingerprint(["a", "b"]) != prompts_fingerprint(["b", "a"])
    assert prompts_fingerprint([(1, 2)]) == prompts_fingerprint([[1, 2]])

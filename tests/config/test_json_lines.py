"""Files of JSON lines as editors and exports write them, and every complaint with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dflash.config.json_lines import read_json_lines
from trtllm_dflash.errors import ConfigError


def test_every_object_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"a": 1}\n\n  {"a": 2}\r\n{"a": 3}')
    assert read_json_lines(file) == [
        (f"{file}, line 1", {"a": 1}),
        (f"{file}, line 3", {"a": 2}),
        (f"{file}, line 4", {"a": 3}),
    ]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\u3000"])
def test_characters_that_end_lines_elsewhere_do_not_end_them_in_json(tmp_path: Path, character: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "one{character}two"}}\n', encoding="utf-8")
    assert [row["prompt"] for _, row in read_json_lines(file)] == [f"one{character}two"]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(r'{"prompt": "\ud83e\udd8a"}')
    assert read_json_lines(file)[0][1] == {"prompt": "🦊"}


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x"}', encoding="utf-8-sig")
    assert len(read_json_lines(file)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b'{"a": 1}\n{', "line 2: not JSON"),
        (b"[1]", "line 1: got list, expected a JSON object"),
        (b'{"prompt": "\xe4"}', "is not UTF-8"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"prompt": "a \\ud800 b"}', "line 1: has half of a surrogate pair"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json_lines(file)


def test_a_folder_and_no_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_json_lines(path)

"""JSON lines that users bring: one object a line, every complaint with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import ConfigError


def read_json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not blank; the place is ``FILE, line N``.

    Lines end at line feeds alone: JSON may hold U+2028 and other characters that ``str.splitlines`` takes for ends. A
    byte order mark, which some editors write, is skipped.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, has a line that is no JSON object, or no line at all.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", hint="give a JSON lines file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 (byte {error.start})", hint="give a JSON lines file") from error
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: not JSON: {error}") from error
        if _has_half_characters(line, row):
            raise ConfigError(f"{place}: has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: got {type(row).__name__}, expected a JSON object")
        lines.append((place, row))
    if not lines:
        raise ConfigError(f"{file}: has no prompts", hint='one JSON object a line, e.g. {"prompt": "…"}')
    return lines


def _has_half_characters(line: str, row: object) -> bool:
    """JSON can write halves of characters, which no tokenizer and no connection takes."""
    if "\\u" not in line:
        return False
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False

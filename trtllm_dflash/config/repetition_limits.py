"""How often a grammar may repeat something by a written count.

xgrammar's work can grow with the square of a count, so one short text can ask for minutes. This cheap look at the text
refuses the plain cases with a reason; what it cannot see (several counts, long texts) ends by the time limit of
:mod:`trtllm_dflash.runtime.grammar_process`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MAX_REPETITIONS = 10_000
_COUNT = r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}"
# What is only text comes first, so that braces in it are passed over: escapes and classes; in EBNF also literals and
# comments.
_IN_REGEX = re.compile(rf"\\.|\[(?:\\.|[^\]\\])*\]|{_COUNT}", re.DOTALL)
_IN_EBNF = re.compile(rf'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|{_COUNT}', re.DOTALL)


def largest_repetition(kind: str, text: str) -> int:
    """The largest count of a repetition ``{n}``, ``{n,}`` or ``{n,m}`` in a form for the output; 0 without one.

    Args:
        kind: ``regex``, ``grammar`` or ``json_schema`` (whose ``pattern`` and ``patternProperties`` are looked at; the
        text must be JSON). Other kinds hold none.
    """
    if kind == "regex":
        return _largest(_IN_REGEX, text)
    if kind == "grammar":
        return _largest(_IN_EBNF, text)
    if kind == "json_schema":
        return max((_largest(_IN_REGEX, pattern) for pattern in _patterns(json.loads(text))), default=0)
    return 0


def _largest(scanner: re.Pattern[str], text: str) -> int:
    # Digits are cut before they are numbers: Python refuses to read thousands of them.
    counts = (digits for found in scanner.finditer(text) for digits in found.groups() if digits)
    return max((int(digits.lstrip("0")[:18] or "0") for digits in counts), default=0)


def _patterns(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            if key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _patterns(value)

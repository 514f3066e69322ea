"""What an output must look like: a JSON schema, any JSON object, a regular expression, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from trtllm_dflash.config.repetition_limits import MAX_REPETITIONS, largest_repetition
from trtllm_dflash.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "grammar")
MAX_GRAMMAR_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
_FIELD = "structured_output"


@dataclass(frozen=True)
class StructuredOutput:
    """A form for the output.

    Attributes:
        kind: ``json_schema`` (``text`` is the schema), ``json_object`` (no text), ``regex`` (the whole output matches),
        or ``grammar`` (EBNF in GBNF's notation, its start rule called ``root``).
        text: at most 64 KiB, with counts of repetition of at most 10,000.
    """

    kind: GrammarKind
    text: str = ""

    @staticmethod
    def parse(value: object) -> StructuredOutput:
        """From a mapping of one key: ``{"json_schema": SCHEMA}``, ``{"json_object": true}``, ``{"regex": TEXT}`` or
        ``{"grammar": TEXT}``. A schema is a mapping, a truth value, or JSON text of one.

        Raises:
            RequestError: anything else. Whether the text is a grammar is checked where it is compiled.
        """
        if isinstance(value, StructuredOutput):
            value = {value.kind: True if value.kind == "json_object" else value.text}
        if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in KINDS:
            raise RequestError(_FIELD, _shortened(value), f"a mapping with one key of {', '.join(KINDS)}")
        kind, content = cast("tuple[GrammarKind, object]", next(iter(value.items())))
        if kind == "json_object":
            if content is not True:
                raise RequestError(_FIELD, {kind: _shortened(content)}, "true for json_object")
            return StructuredOutput(kind)
        text = _schema_text(content) if kind == "json_schema" else content
        if not isinstance(text, str) or not text:
            raise RequestError(_FIELD, {kind: _shortened(content)}, f"a text that is not empty for {kind}")
        if len(text.encode("utf-8", errors="replace")) > MAX_GRAMMAR_BYTES:
            raise RequestError(_FIELD, f"a {kind} of {len(text)} characters", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if (count := largest_repetition(kind, text)) > MAX_REPETITIONS:
            raise RequestError(
                _FIELD, {kind: _shortened(text)}, f"counts of repetition of at most {MAX_REPETITIONS}, not {count}"
            )
        return StructuredOutput(kind, text)


def _schema_text(content: object) -> str:
    try:
        schema = json.loads(content) if isinstance(content, str) else content
        if not isinstance(schema, bool | Mapping):
            raise ValueError("it is neither an object nor true or false")
        if _depth(schema) > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_SCHEMA_DEPTH}")
        # The order of keys is the order in which they are generated.
        return json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(_FIELD, {"json_schema": _shortened(content)}, f"a JSON schema: {error}") from error


def _depth(value: object) -> int:
    if isinstance(value, Mapping):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."

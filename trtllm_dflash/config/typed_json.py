"""Frozen configuration dataclasses to JSON and back, with every value checked against its annotation."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trtllm_dflash.config.json_reader import JsonObject

C = TypeVar("C")


def to_json(facts: object) -> dict[str, object]:
    """The fields of a dataclass as JSON values: tuples become lists, nested dataclasses objects.

    Args:
        facts: a dataclass instance of numbers, strings, booleans, None, tuples and dataclasses of those.
    """
    if not is_dataclass(facts) or isinstance(facts, type):
        raise TypeError(f"{facts!r} is not a dataclass instance")
    return {key: _plain(value) for key, value in asdict(facts).items()}


def from_json(cls: type[C], source: JsonObject) -> C:
    """Build dataclass ``cls`` from an object that has exactly its fields.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong type, by file and key.
    """
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key in source:
        if key not in names:
            raise source.error(key, "no such field; known are " + ", ".join(names))
    for name in names:
        if name not in source.data:
            raise source.error(name, "a value")
    return cls(**{name: _parse(source, name, source.data[name], hints[name]) for name in names})


def _plain(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _parse(source: JsonObject, key: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return _parse(source, key, value, inner)
    if origin is Literal:
        if value not in get_args(hint) or isinstance(value, bool):
            raise source.error(key, "one of " + ", ".join(map(repr, get_args(hint))))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise source.error(key, "a list")
        return tuple(_parse(source, key, item, get_args(hint)[0]) for item in value)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise source.error(key, "an object")
        return from_json(hint, JsonObject(value, source.file, source.name_of(key)))  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise source.error(key, f"a value of type {hint.__name__}")
    return value

"""Typed reading of JSON configuration: every error names the file, the key, the value found and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

from trtllm_dflash.config.finite import is_finite
from trtllm_dflash.errors import ConfigError


class _Missing(Enum):
    MISSING = "missing"


_MISSING = _Missing.MISSING


class JsonObject:
    """One JSON object of a configuration file, with its place in that file.

    A key that is absent and a key whose value is ``null`` are treated alike: both take the default, and both are an
    error where there is no default.

    Args:
        data: the decoded object.
        file: the file it was read from, for messages.
        place: dotted path of this object inside the file; empty for the root.
    """

    def __init__(self, data: Mapping[str, object], file: Path, place: str = "") -> None:
        self.data = dict(data)
        self.file = file
        self.place = place

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def has(self, key: str) -> bool:
        """Whether ``key`` is present with a value other than null."""
        return self.data.get(key) is not None

    def name_of(self, key: str) -> str:
        """Dotted path of ``key`` in the file."""
        return f"{self.place}.{key}" if self.place else key

    def error(self, key: str, expected: str, *, hint: str | None = None) -> ConfigError:
        """A :class:`ConfigError` about ``key``: what was found, what was expected and where."""
        found = json.dumps(self.data[key]) if key in self.data else "nothing"
        return ConfigError(f"{self.file}: key '{self.name_of(key)}': found {found}, expected {expected}", hint=hint)

    def _value(self, key: str, default: object, expected: str) -> object:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(key, expected)
        return default

    def integer(
        self,
        key: str,
        *,
        default: int | _Missing = _MISSING,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int:
        """An integer within ``[minimum, maximum]``."""
        expected = "an integer" + _range_words(minimum, maximum)
        value = self._value(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not _within(value, minimum, maximum):
            raise self.error(key, expected)
        return value

    def optional_integer(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int | None:
        """An integer within the range, or None where the key is absent or null."""
        return self.integer(key, minimum=minimum, maximum=maximum) if self.has(key) else None

    def number(self, key: str, *, default: float | _Missing = _MISSING, above: float | None = None) -> float:
        """A finite number, greater than ``above`` where given."""
        expected = "a finite number" + (f" > {above:g}" if above is not None else "")
        value = self._value(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            raise self.error(key, expected)
        if above is not None and value <= above:
            raise self.error(key, expected)
        return float(value)

    def optional_number(self, key: str, *, above: float | None = None) -> float | None:
        """A finite number, or None where the key is absent or null."""
        return self.number(key, above=above) if self.has(key) else None

    def boolean(self, key: str, *, default: bool | _Missing = _MISSING) -> bool:
        """true or false."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def optional_boolean(self, key: str) -> bool | None:
        """true, false, or None where the key is absent or null."""
        return self.boolean(key) if self.has(key) else None

    def string(self, key: str, *, default: str | _Missing = _MISSING, choices: tuple[str, ...] = ()) -> str:
        """A string, one of ``choices`` where given."""
        expected = "one of " + ", ".join(choices) if choices else "a string"
        value = self._value(key, default, expected)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.error(key, expected)
        return value

    def optional_string(self, key: str) -> str | None:
        """A string, or None where the key is absent or null."""
        return self.string(key) if self.has(key) else None

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._value(key, _MISSING, "a list of integers")
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self.error(key, "a list of integers")
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(key, _MISSING, "a list of strings")
        if not isinstance(value, list) or any(not isinstance(i, str) for i in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def child(self, key: str) -> JsonObject:
        """The object under ``key``."""
        value = self._value(key, _MISSING, "an object")
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonObject(value, self.file, self.name_of(key))

    def optional_child(self, key: str) -> JsonObject | None:
        """The object under ``key``, or None where the key is absent or null."""
        return self.child(key) if self.has(key) else None


def read_json(file: Path) -> JsonObject:
    """Read a JSON file whose root is an object.

    Raises:
        ConfigError: the file is missing, is not JSON, or its root is not an object.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: no such file", hint="give the directory of a Hugging Face checkpoint, which has a config.json"
        ) from None
    except OSError as problem:
        raise ConfigError(f"{file}: cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text, expected JSON") from None
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{file}: line {problem.lineno}: not valid JSON: {problem.msg}") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file}: cannot be read as JSON: {problem}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: found a JSON {type(data).__name__}, expected an object")
    return JsonObject(data, file)


def config_file(path: Path) -> Path:
    """``path`` itself if it is a file, else the ``config.json`` inside it."""
    return path / "config.json" if path.is_dir() or path.suffix != ".json" else path


def _within(value: int, minimum: int | None, maximum: int | None) -> bool:
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _range_words(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f" in [{minimum}, {maximum}]"
    if minimum is not None:
        return f" >= {minimum}"
    return f" <= {maximum}" if maximum is not None else ""

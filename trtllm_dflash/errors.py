"""The error hierarchy. Every message says what was found, what was expected, where, and what to do next."""

from __future__ import annotations


class DFlashError(Exception):
    """Base of every error this toolkit raises on purpose.

    Args:
        message: what was found, what was expected and where (file and key).
        hint: the next step, printed by the command line as ``hint: …``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(DFlashError):
    """A configuration file or option is missing, contradictory or unsupported."""

    exit_code = 2


class CheckpointError(DFlashError):
    """A checkpoint's tensors or files are missing, damaged or of the wrong shape."""

    exit_code = 2


class BuildError(DFlashError):
    """An engine could not be built."""


class EngineError(DFlashError):
    """An engine could not be loaded or failed while running."""


def shown(value: object) -> str:
    """``value`` as messages show it; Python itself prints no integer of more than a few thousand digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


class RequestError(DFlashError):
    """A request is invalid. Names the field, the value given and the allowed range.

    Args:
        field: name of the offending request field.
        value: the value that was given.
        allowed: the allowed values or range, in words.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str, *, hint: str | None = None) -> None:
        super().__init__(f"{field}: got {shown(value)}, expected {allowed}", hint=hint)
        self.field = field
        self.value = value
        self.allowed = allowed


class QueueFullError(DFlashError):
    """As many requests wait as may; nothing is wrong with this one.

    Args:
        waiting: requests that wait. max_queue: how many may. retry_after_s: when a place is likely to be free, seconds.
    """

    def __init__(self, waiting: int, max_queue: int, retry_after_s: float) -> None:
        super().__init__(
            f"queue: got {waiting} waiting requests, expected fewer than max_queue={max_queue}; "
            f"try again in {retry_after_s:.0f} s",
            hint="send fewer requests at a time, or allow a longer queue",
        )
        self.waiting = waiting
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s

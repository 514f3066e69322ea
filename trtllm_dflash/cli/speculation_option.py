"""``--speculation`` and ``--no-speculation``, the same for every command that generates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def speculation_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the parameter ``speculation``: ``auto``, ``on`` or ``off``. ``--speculation`` alone means ``on``."""

    @click.option(
        "--speculation",
        type=click.Choice(["auto", "on", "off"]),
        is_flag=False,
        flag_value="on",
        default="auto",
        help="auto: with a drafter, on a GPU as far as it pays; on: always the whole block; off: plain decoding.  "
        "[default: auto; on where no value is given]",
    )
    @click.option("--no-speculation", is_flag=True, help="As --speculation off.")
    @functools.wraps(command)
    def resolved(*arguments: Any, speculation: str, no_speculation: bool, **others: Any) -> Any:
        if no_speculation and speculation == "on":
            raise click.UsageError("--speculation and --no-speculation exclude each other")
        return command(*arguments, speculation="off" if no_speculation else speculation, **others)

    return resolved

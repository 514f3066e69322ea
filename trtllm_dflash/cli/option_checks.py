"""Options that were given where they have no effect: refused, because who gives one expects something of it."""

from __future__ import annotations

import click
from click.core import ParameterSource


def given(*names: str) -> list[str]:
    """Which of the current command's parameters ``names`` were on the command line, as they are spelled there."""
    context = click.get_current_context()
    spelled = {parameter.name: _spelling(parameter) for parameter in context.command.params}
    return [spelled[name] for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def refuse_given(names: tuple[str, ...], why: str) -> None:
    """Raise ``click.UsageError`` when one of the parameters ``names`` was on the command line.

    Args:
        names: parameters that have no effect here. why: the condition and what to do instead, after the options' names.
    """
    if found := given(*names):
        verb = "has" if len(found) == 1 else "have"
        raise click.UsageError(f"{', '.join(found)} {verb} no effect {why}")


def _spelling(parameter: click.Parameter) -> str:
    """``--prefix-cache/--no-prefix-cache`` for a switch, else the long form."""
    longest = max(parameter.opts, key=len)
    return "/".join([longest, *parameter.secondary_opts])

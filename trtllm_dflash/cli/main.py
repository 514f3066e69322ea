"""The ``trtllm-dflash`` command: commands are loaded when used, errors are printed without a traceback."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

import click

import trtllm_dflash
from trtllm_dflash.cli.os_errors import refusal_of
from trtllm_dflash.errors import DFlashError

# name → module of cli/; the click command has the same name as the attribute.
_COMMANDS = {
    "quickstart": "quickstart_cmd",
    "convert": "convert_cmd",
    "build": "build_cmd",
    "inspect": "inspect_cmd",
    "generate": "generate_cmd",
    "deploy": "deploy_cmd",
    "serve": "serve_cmd",
    "bench": "bench_cmd",
    "sweep": "sweep_cmd",
    "plugins": "plugins_cmd",
    "selfcheck": "selfcheck_cmd",
    "doctor": "doctor_cmd",
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"trtllm_dflash.cli.{module}"), cmd_name)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(trtllm_dflash.__version__, prog_name="trtllm-dflash")
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
def cli(debug: bool) -> None:
    """DFlash and DFlash 2 speculative decoding: from two checkpoints to a Triton endpoint.

    \b
    Start here:
      trtllm-dflash quickstart
      trtllm-dflash doctor
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit code 0 done, 1 failed, 2 wrong usage or unusable input."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        outcome: Any = cli.main(args=arguments, prog_name="trtllm-dflash", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DFlashError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and (refusal := refusal_of(error)):
            click.echo(f"error: {refusal.message}", err=True)
            click.echo(f"hint: {refusal.hint}", err=True)
            sys.exit(refusal.exit_code)
        click.echo(f"error: {type(error).__name__}: {error}", err=True)
        click.echo(
            "hint: run again with --debug for a traceback; this is a fault of the toolkit, please report it", err=True
        )
        sys.exit(1)
    sys.exit(outcome if isinstance(outcome, int) else 0)


if __name__ == "__main__":
    main()

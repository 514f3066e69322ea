"""Every command line and every option that the documents and the help texts show is one that we take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from trtllm_dflash.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "triton_server_repo" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Options in the documents that belong to others: click's own, pip's, the engine process's, and the benchmarks'.
OTHERS = {"--help", "--no-deps", "--drain-s"}
BENCHMARKS = {
    name for path in (ROOT / "benchmarks").glob("*.py") for name in re.findall(r'"(--[a-z0-9-]+)"', path.read_text())
}


def _command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The click command that ``words`` begin with, and what follows."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            break
        command, words = found, words[1:]
    return command, words


def _commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}

    def add(name: str, command: click.Command) -> None:
        found[name] = command
        if isinstance(command, click.Group):
            for below in command.list_commands(click.Context(command)):
                child = command.get_command(click.Context(command), below)
                assert child is not None
                add(f"{name} {below}".strip(), child)

    add("", cli)
    return found


COMMANDS = _commands()


def _shown_in(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    return re.findall(r"^\s*(?:.*\.venv/bin/)?trtllm-dflash ((?!.*…)[a-z].*?)\s*(?:#.*)?$", joined, re.MULTILINE)


SHOWN = [
    *((page.name, line) for page in PAGES for line in _shown_in(page.read_text())),
    *(
        (f"help of {name}", line)
        for name, command in COMMANDS.items()
        for line in _shown_in(f"{command.help or ''}\n{command.epilog or ''}")
    ),
]


@pytest.mark.parametrize(("place", "line"), SHOWN, ids=[f"{place}: {line}" for place, line in SHOWN])
def test_a_command_line_is_understood(place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").mkdir()
    for name in ("old-sweep", "sweep", "sweep-main", "sweep-branch"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    command, words = _command(shlex.split(line))
    assert not isinstance(command, click.Group) or command.invoke_without_command
    command.make_context("trtllm-dflash", words)  # parses, and runs nothing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_option_in_a_document_exists(page: Path) -> None:
    known = {
        name for command in COMMANDS.values() for one in command.params for name in (*one.opts, *one.secondary_opts)
    }
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
    assert shown - known - OTHERS - BENCHMARKS == set()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_help_has_an_example(name: str) -> None:
    command = COMMANDS[name]
    text = f"{command.help}\n{command.epilog or ''}"
    assert f"trtllm-dflash {name}" in text

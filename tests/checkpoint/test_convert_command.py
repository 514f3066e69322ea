"""The command ``convert``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.cli.convert_cmd import convert
from trtllm_dflash.errors import CheckpointError


def test_json_report(tmp_path: Path, target: Path, drafter: Path) -> None:
    """One JSON document on stdout, nothing on stderr when it is no terminal."""
    out = tmp_path / "out"
    result = CliRunner().invoke(
        convert, ["--target", str(target), "--drafter", str(drafter), "-o", str(out), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == {"output", "dtype", "tensors", "bytes", "seconds", "peak_host_mb", "notes"}
    assert report["bytes"] == sum(record.bytes for record in open_checkpoint(out).files.values())
    assert result.stderr == ""


def test_drafter_none_and_text_report(tmp_path: Path, target: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target), "--drafter", "none", "-o", str(out), "--tp-size", "2", "--dtype", "float16"]
    result = CliRunner().invoke(convert, arguments, catch_exceptions=False)
    assert "float16" in result.stdout
    checkpoint = open_checkpoint(out)
    assert checkpoint.drafter_config is None
    assert checkpoint.mapping.tp_size == 2


def test_errors_are_left_to_the_main_command(tmp_path: Path, target: Path) -> None:
    arguments = ["--target", str(target), "--drafter", "none", "-o", str(tmp_path / "out")]
    CliRunner().invoke(convert, arguments, catch_exceptions=False)
    with pytest.raises(CheckpointError, match="already exists"):
        CliRunner().invoke(convert, arguments, catch_exceptions=False)
    assert CliRunner().invoke(convert, [*arguments, "--force"], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--dtype", "fp32"), ("--quantization", "int4"), ("--tp-size", "0"), ("--kv-cache-dtype", "x")],
)
def test_wrong_usage(tmp_path: Path, option: str, value: str) -> None:
    arguments = ["--target", "demo", "--drafter", "none", "-o", str(tmp_path / "out"), option, value]
    result = CliRunner().invoke(convert, arguments)
    assert result.exit_code == 2
    assert option in result.stderr


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(convert, ["--help"])
    assert "convert --target demo --drafter demo" in result.stdout

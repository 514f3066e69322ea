"""``doctor`` lists every extra: what it is for, what is here, and the line that brings the rest."""

from __future__ import annotations

import importlib.metadata
import json
from email.message import Message
from pathlib import Path

import pytest

from trtllm_dflash.cli.extras import PURPOSES, installed_extras
from trtllm_dflash.cli.main import main

VERSIONS = {"gguf": "0.18.0", "matplotlib": "3.8.1", "scipy": "1.14.0", "numpy": "2.0.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with two extras, and some packages."""
    metadata = Message()
    for name in ("demo", "bench"):
        metadata["Provides-Extra"] = name
    for text in (
        "numpy>=1.26",
        'gguf<1,>=0.17; extra == "demo"',
        'matplotlib<4,>=3.9; extra == "bench"',
        'scipy>=1.12; extra == "bench"',
        'pyyaml>=6; extra == "bench"',
    ):
        metadata["Requires-Dist"] = text

    def version(name: str) -> str:
        if name not in VERSIONS:
            raise importlib.metadata.PackageNotFoundError(name)
        return VERSIONS[name]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    monkeypatch.setattr(importlib.metadata, "version", version)


def test_extras_are_the_ones_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(PURPOSES) == set(project["optional-dependencies"])


def test_packages_are_held_to_their_versions(installed: None) -> None:
    extras = {extra.name: extra for extra in installed_extras()}
    assert (extras["demo"].found, extras["demo"].lacking) == (("gguf 0.18.0",), ())
    assert extras["bench"].found == ("scipy 1.14.0",)
    assert extras["bench"].lacking == ("matplotlib<4,>=3.9 (here: 3.8.1)", "pyyaml>=6")
    assert not extras["triton"].is_known


def test_doctor_says_what_installs_an_extra(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    findings = {one["name"].split(" (")[0]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["extra demo"]["state"], findings["extra demo"]["found"]) == ("ok", "gguf 0.18.0")
    bench = findings["extra bench"]
    assert (bench["state"], bench["fix"]) == ("missing", 'pip install "trtllm-dflash[bench]"')
    assert bench["found"] == "not installed: matplotlib<4,>=3.9 (here: 3.8.1), pyyaml>=6; installed: scipy 1.14.0"
    assert bench["name"] == "extra bench (sweep: charts, intervals, YAML; energy per token)"
    assert "older than this code" in findings["extra triton"]["found"]

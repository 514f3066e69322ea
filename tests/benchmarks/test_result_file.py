"""Result files keep, for every figure, who made it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

# benchmarks/ is no installed package: it runs from the tree.
_SPEC = importlib.util.spec_from_file_location(
    "result_file", Path(__file__).resolve().parents[2] / "benchmarks" / "result_file.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
result_file = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(result_file)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that takes the place of ``benchmarks/results``."""
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    return tmp_path


def made_at(monkeypatch: pytest.MonkeyPatch, machine: str, commit: str) -> None:
    monkeypatch.setattr(result_file, "machine", lambda: machine)
    monkeypatch.setenv("DFLASH_COMMIT", commit)


def test_a_part_leaves_the_maker_of_the_others(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_at(monkeypatch, "a GPU", "aaa")
    result_file.write_result("kernels", {"attention_us": 1.0, "inject_us": 2.0}, shapes={"batch": 1})
    made_at(monkeypatch, "two cores", "bbb")
    path = result_file.write_result("kernels", {"build_s": 300.0}, shapes={})
    document = json.loads(path.read_text())
    makers = {figure: document["parts"][part] for figure, part in document["made_by"].items()}
    assert {figure: (maker["machine"], maker["commit"]) for figure, maker in makers.items()} == {
        "attention_us": ("a GPU", "aaa"),
        "inject_us": ("a GPU", "aaa"),
        "build_s": ("two cores", "bbb"),
    }
    assert document["machine"] == "a GPU"


def test_a_part_nobody_needs_is_dropped(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("aaa", "bbb"):
        made_at(monkeypatch, "a GPU", commit)
        path = result_file.write_result("kernels", {"attention_us": 1.0}, shapes={})
    document = json.loads(path.read_text())
    assert [part["commit"] for part in document["parts"].values()] == ["bbb"]


def test_the_older_form_is_read(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures once named their maker without the machine, which stood at the head for all of them."""
    maker = {"command": "python -m benchmarks.old", "commit": "old", "date": "2026-01-01"}
    (results / "kernels.json").write_text(
        json.dumps(
            {"name": "kernels", "machine": "a GPU", "versions": {}, "figures": {"x": 1}, "made_by": {"x": maker}}
        )
    )
    made_at(monkeypatch, "two cores", "new")
    document = json.loads(result_file.write_result("kernels", {"y": 2}, shapes={}).read_text())
    assert document["parts"][document["made_by"]["x"]] == {**maker, "machine": "a GPU", "versions": {}}
    assert document["parts"][document["made_by"]["y"]]["machine"] == "two cores"

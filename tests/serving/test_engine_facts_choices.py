"""The startup line says what the operator chose, not what the engine could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.serving.engine_facts import read_engine_facts
from trtllm_dflash.serving.repository import deploy, repository_facts, repository_runs


def test_a_smaller_block_and_fewer_slots_are_said(tiny_engines: Callable[..., Path]) -> None:
    facts = read_engine_facts(tiny_engines("llama-v2"))
    line = facts.with_choices(block_size=2, max_running=3).startup_line()
    assert f"block size 2 of {facts.runs['block_size'].split()[-1]}" in line
    assert "max running 3" in line
    assert facts.with_choices(block_size=2, max_running=3).limits.max_batch_size == 3
    assert facts.with_choices(block_size=facts.limits.block_size, max_running=None).runs == facts.runs


@pytest.mark.parametrize(
    ("choices", "words", "others"),
    [
        ({"speculation": "off"}, ["speculation off"], ["captured layers", "max running"]),
        ({"block_size": 2, "max_running": 3}, ["speculation DFlash 2", "block size 2 of", "max running 3"], []),
        ({}, ["speculation DFlash 2"], ["max running"]),
    ],
)
def test_a_repository_says_what_deploy_chose(
    tiny_engines: Callable[..., Path],
    tmp_path: Path,
    choices: dict[str, Any],
    words: list[str],
    others: list[str],
) -> None:
    """``serve`` prints this before the engine process, which has its choices on the command line, says anything."""
    report = deploy(tiny_engines("llama-v2"), tmp_path / "models", **choices)
    line = repository_runs(tmp_path / "models").startup_line()
    assert line == report.facts.startup_line()
    assert all(word in line for word in words)
    assert not any(word in line for word in others)
    assert repository_facts(tmp_path / "models")["speculation"] == ("speculation off" not in line)
    assert report.facts.limits.max_batch_size == choices.get("max_running", 16)


def test_plain_decoding_names_no_drafter(tiny_engines: Callable[..., Path]) -> None:
    line = read_engine_facts(tiny_engines("llama-v2")).with_choices(block_size=1, max_running=None).startup_line()
    assert "speculation off" in line
    assert "captured layers" not in line
    assert "backend torch" in line


def test_windows_and_causality_of_the_drafters_layers_are_said(tiny_engines: Callable[..., Path]) -> None:
    facts = read_engine_facts(tiny_engines("qwen3-v1"))
    assert facts.runs["windows"] == "full 5-causal full"
    assert "windows full 5-causal full" in facts.startup_line()

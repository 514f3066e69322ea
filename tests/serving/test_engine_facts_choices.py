"""The startup line says what the operator chose, not what the engine could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtllm_dflash.serving.engine_facts import read_engine_facts


def test_a_smaller_block_and_fewer_slots_are_said(tiny_engines: Callable[..., Path]) -> None:
    facts = read_engine_facts(tiny_engines("llama-v2"))
    line = facts.with_choices(block_size=2, max_running=3).startup_line()
    assert f"block size 2 of {facts.runs['block_size'].split()[-1]}" in line
    assert "max running 3" in line
    assert facts.with_choices(block_size=2, max_running=3).limits.max_batch_size == 3
    assert facts.with_choices(block_size=facts.limits.block_size, max_running=None).runs == facts.runs


def test_plain_decoding_names_no_drafter(tiny_engines: Callable[..., Path]) -> None:
    line = read_engine_facts(tiny_engines("llama-v2")).with_choices(block_size=1, max_running=None).startup_line()
    assert "speculation off" in line
    assert "captured layers" not in line
    assert "backend torch" in line

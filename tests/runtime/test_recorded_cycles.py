"""Recorded cycles without a GPU: a stand-in runs the recorded function again, with all that recording had fixed.

What is true of every graph is tested so: batches are padded to buckets, and whatever is not a tensor is as it was when
the graph was recorded. The graphs themselves are tested on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime import cycle_runner
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_k=9, top_p=0.9, ignore_eos=True)
KINDS = (
    GREEDY,
    SAMPLED,
    replace(GREEDY, frequency_penalty=0.4, repetition_penalty=1.2),
    replace(SAMPLED, bad_words=("a", "cd"), logit_bias={ACTIVE[7]: 2.0}),
)


class _Recorded:
    def __init__(self, function: Callable[[], object]) -> None:
        self.replay = function


class _Pool:
    """Runs what it records once, as a real one does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = 0

    def capture(self, function: Callable[[], object]) -> _Recorded:
        function()
        self.captured += 1
        return _Recorded(function)


def _facts(output: RequestOutput) -> tuple[object, ...]:
    return output.token_ids, output.finish_reason, output.metrics.accepted_histogram


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_padded_batches_change_nobodys_output(
    tiny_engines: Callable, tiny_llms: Callable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Batches of every size up to eight in buckets of 1, 2, 4 and 8, of lengths far beyond those at the recording.

    Pages are scarce, and slots and pages of whoever ends are another's in the next cycle.
    """
    draw = random.Random(5)
    prompts = [[draw.choice(ACTIVE) for _ in range(draw.choice((1, 3, 20, 50, 170)))] for _ in range(24)]
    each = [replace(KINDS[n % 4], seed=n, max_tokens=draw.choice((2, 5, 9, 50))) for n in range(24)]
    expected = tiny_llms(name).generate(prompts, each)
    monkeypatch.setattr(cycle_runner, "GraphPool", _Pool)
    with LLM(
        tiny_engines(name, max_batch_size=8, max_num_tokens=24),
        device="cpu",
        kv_cache_tokens=32 * 20,
        options=EngineOptions(graphs=True, overlap=True),
    ) as llm:
        found = llm.generate(prompts, each)
        stats = llm.stats()
    assert [_facts(output) for output in found] == [_facts(output) for output in expected]
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)

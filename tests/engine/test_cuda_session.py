"""The torch backend on a CUDA GPU gives what it gives on the CPU (float32)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trtllm_dflash import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EngineFactory = Callable[..., Path]
PROMPTS = [[random.Random(length).randrange(10, 250) for _ in range(length)] for length in (1, 3, 17, 64, 100)]


def _tokens(engines: Path, device: str, params: SamplingParams, speculation: str) -> list[tuple[int, ...]]:
    with LLM(engines, device=device, speculation=speculation, kv_cache_tokens=4096) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, params)
        stats = llm.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v2", "qwen3-v1", "llama-v1"])
@pytest.mark.parametrize("speculation", ["on", "off"])
def test_greedy_tokens_equal_the_cpus(tiny_engines: EngineFactory, pair: str, speculation: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    engines = tiny_engines(pair)
    assert _tokens(engines, "cuda:0", params, speculation) == _tokens(engines, "cpu", params, "off")


def test_sampled_tokens_with_every_parameter_equal_the_cpus(tiny_engines: EngineFactory) -> None:
    params = SamplingParams(
        max_tokens=24,
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={20: 1.5},
        bad_words=("a",),
        min_tokens=5,
        seed=11,
    )
    engines = tiny_engines("llama-v2")
    assert _tokens(engines, "cuda:0", params, "on") == _tokens(engines, "cpu", params, "on")

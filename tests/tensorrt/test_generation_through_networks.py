"""The runtime on interpreted networks (target, inject and draft) against the torch backend, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted_session import interpreted_session
from recorded_plugins import recorded
from tensorrt_requests import RequestFactory, native_limits, paged_limits, request_of

from trtllm_dflash import SamplingParams
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary
from trtllm_dflash.runtime import llm as llm_module
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import RequestOutput


def generate(
    engines: Path,
    prompts: list[str],
    params: SamplingParams | list[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    request: NetworkRequest | None = None,
) -> list[RequestOutput]:
    """On the torch backend, or through the interpreted networks of ``request`` with the same tokenizer."""
    with monkeypatch.context() as patch:
        if request is not None:
            patch.setattr(llm_module, "load_session", lambda *args, **kwargs: interpreted_session(request))
        with LLM(engines, device="cpu") as llm:
            outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs)
    return outputs


def lowered(request: NetworkRequest, lowering: str, **limits: int) -> NetworkRequest:
    """The request in a lowering, with limits as ``build`` would set them."""
    block_size = request.limits.block_size
    if lowering == "plugin":
        return recorded(replace(request, limits=paged_limits(block_size, **limits)))
    return replace(request, limits=native_limits(block_size, **limits))


@pytest.mark.parametrize("lowering", ["native", "plugin"])
@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v1"])
def test_more_requests_than_rows(
    tiny_request: RequestFactory,
    tiny_engines: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    pair: str,
    lowering: str,
) -> None:
    """Seven requests of different lengths share three rows, greedy and sampled, prompts longer than one pass."""
    prompts = ["ab " * n + "the" for n in (1, 40, 5, 2, 13, 30, 3)]
    params = [
        SamplingParams(max_tokens=10 + 3 * n, temperature=0.0 if n % 2 else 0.8, seed=n, ignore_eos=n % 3 > 0)
        for n in range(len(prompts))
    ]
    engines = tiny_engines(pair)
    request = lowered(tiny_request(pair), lowering, seq_len=256)
    expected = generate(engines, prompts, params, monkeypatch)
    found = generate(engines, prompts, params, monkeypatch, request)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [o.metrics.accepted_histogram for o in found] == [o.metrics.accepted_histogram for o in expected]


@pytest.mark.parametrize("lowering", ["native", "plugin"])
def test_demo_pair_32_greedy_tokens(
    rtx: TensorRTLibrary,
    demo_checkpoint: Callable[[str], Path],
    demo_pair: Any,
    monkeypatch: pytest.MonkeyPatch,
    lowering: str,
) -> None:
    request = lowered(request_of(rtx, demo_checkpoint("float32")), lowering, batch=2, seq_len=128)
    prompts = ["What is the capital of France?", "Count from one to ten in words."]
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    expected = generate(demo_pair.engines, prompts, params, monkeypatch)
    found = generate(demo_pair.engines, prompts, params, monkeypatch, request)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert all(len(output.token_ids) == 32 for output in found)

"""Emitted native networks, computed by the interpreter, against the torch dialect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_sessions import Observed, drive, relative_error
from interpreted_session import interpreted_session
from quantised_drafters import quantised_drafter
from tensorrt_requests import RequestFactory, native_limits, request_of
from torch_reference import torch_session

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.linear_session import LinearSession
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

# Float32 products summed in another order: a few ulps per layer, amplified by depth.
TOLERANCE = 1e-5
PairFactory = Callable[[str], Any]
PAIRS = ("llama-v2", "qwen3-v1", "qwen3-v2", "llama-v1", "llama-bias")


def observe(request: NetworkRequest, seed: int, block_size: int | None = None) -> tuple[Observed, Observed]:
    """The passes on the interpreted networks and on torch."""
    generator = torch.Generator().manual_seed(seed)
    vocab = request.target_config.vocab_size
    prompts = [torch.randint(vocab, (length,), generator=generator) for length in (23, 1, 40)[: 2 + seed % 2]]
    temperatures = torch.tensor([0.0, 0.7, 1.3])[: len(prompts)]
    block = request.limits.block_size if block_size is None else block_size
    arguments = {"seed": seed, "temperatures": temperatures, "block_size": block}
    found = drive(interpreted_session(request), prompts, **arguments)  # type: ignore[arg-type]
    return found, drive(torch_session(request), prompts, **arguments)  # type: ignore[arg-type]


def check(found: Observed, expected: Observed, tolerance: float = TOLERANCE) -> None:
    """Every output of every network, and what the caches show."""
    for name in ("prefill_logits", "prefill_features"):
        assert relative_error(getattr(found, name), getattr(expected, name)) <= tolerance, name
    if expected.draft is not None and found.draft is not None:
        assert torch.equal(found.draft.candidates, expected.draft.candidates)
        assert torch.equal(found.draft.draft_tokens, expected.draft.draft_tokens)
        assert relative_error(found.draft.q_rows, expected.draft.q_rows) <= 10 * tolerance
    for name in ("verify_logits", "verify_features"):
        assert relative_error(getattr(found, name), getattr(expected, name)) <= tolerance, name
    for mine, theirs in zip(found.visible, expected.visible, strict=True):
        assert relative_error(mine, theirs) <= tolerance


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_networks_equal_the_torch_dialect(tiny_request: RequestFactory, pair: str, seed: int) -> None:
    check(*observe(tiny_request(pair), seed))


def test_embedded_weights_compute_the_same(tiny_request: RequestFactory) -> None:
    check(*observe(tiny_request("llama-v2", weights="embedded"), 1))


def test_a_block_shorter_than_the_engines(tiny_request: RequestFactory) -> None:
    check(*observe(tiny_request("qwen3-v2"), 1, block_size=3))


def test_dropped_rows_of_an_injection_change_nothing(tiny_request: RequestFactory) -> None:
    """Also in front of the very first cache position, whose number follows that of "nowhere"."""
    request = tiny_request("llama-v2")
    assert request.drafter_config is not None
    session, reference = interpreted_session(request), torch_session(request)
    assert isinstance(session, LinearSession)
    generator = torch.Generator().manual_seed(6)
    columns = len(request.drafter_config.target_layer_ids) * request.target_config.hidden_size
    features = torch.randn(6, columns, generator=generator)
    positions = torch.tensor([9, 0, 1, 8, 7, 3])
    page_tokens = session.limits.page_tokens
    session.allocate_caches(3)
    reference.allocate_caches(1)
    for layer in session.drafter_caches:
        layer.k.normal_(generator=generator)
        layer.v.normal_(generator=generator)
    before = [tensor.clone() for layer in session.drafter_caches for tensor in (layer.k, layer.v)]
    session.inject(features, positions, torch.tensor([-1, 0, 1, -1, -1, 2 * page_tokens + 3]))
    reference.inject(features, positions, positions)
    after = [tensor for layer in session.drafter_caches for tensor in (layer.k, layer.v)]
    wanted = [tensor[0] for layer in reference.drafter_caches for tensor in (layer.k, layer.v)]
    for old, new, rows in zip(before, after, wanted, strict=True):
        for row, position in ((0, 0), (0, 1), (2, 3)):
            assert relative_error(new[row, :, position], rows[position]) <= TOLERANCE
            new[row, :, position] = old[row, :, position]
        assert torch.equal(new, old)


def test_a_request_of_which_nothing_is_kept_keeps_its_cache(tiny_request: RequestFactory) -> None:
    """Two requests of three rows each: the first row of one, nothing of the other. Only what is visible counts."""
    request = tiny_request("llama-v2")
    assert request.drafter_config is not None
    session = interpreted_session(request)
    assert isinstance(session, LinearSession)
    generator = torch.Generator().manual_seed(7)
    columns = len(request.drafter_config.target_layer_ids) * request.target_config.hidden_size
    page_tokens = session.limits.page_tokens
    session.allocate_caches(3)
    for layer in session.drafter_caches:
        layer.k.normal_(generator=generator)
        layer.v.normal_(generator=generator)
    before = [tensor.clone() for layer in session.drafter_caches for tensor in (layer.k, layer.v)]
    positions, slots = torch.tensor([4, 5, 6, 10, 11, 12]), torch.tensor([page_tokens + 4, -1, -1, -1, -1, -1])
    session.inject(torch.randn(6, columns, generator=generator), positions, slots, queries_per_request=3)
    after = [tensor for layer in session.drafter_caches for tensor in (layer.k, layer.v)]
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(new[1, :, 4], old[1, :, 4])
        assert torch.equal(new[1, :, :4], old[1, :, :4])
        for row in (0, 2):
            assert torch.equal(new[row, :, :page_tokens], old[row, :, :page_tokens])


def test_a_wrong_weight_is_noticed(tiny_request: RequestFactory) -> None:
    """The comparison can fail: one projection of the emitted network is 1 % too large."""
    request = tiny_request("llama-v2")
    name = "transformer.layers.1.mlp.proj.weight"
    spoiled = replace(request, target={**request.target, name: request.target[name] * 1.01})
    prompts, arguments = [torch.arange(5)], {"seed": 0, "temperatures": torch.zeros(1), "block_size": 4}
    wrong = drive(interpreted_session(spoiled), prompts, **arguments)  # type: ignore[arg-type]
    right = drive(torch_session(request), prompts, **arguments)  # type: ignore[arg-type]
    assert relative_error(wrong.prefill_logits, right.prefill_logits) > 10 * TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_networks_stay_close(
    rtx: TensorRTLibrary, tiny_pairs: PairFactory, tmp_path: Path, dtype: str
) -> None:
    """The interpreter also checks the declared dtype of every tensor, which only half precision makes interesting."""
    pair = tiny_pairs("qwen3-v2")
    convert(str(pair.target), str(pair.drafter), tmp_path / "checkpoint", dtype=dtype)
    request = request_of(rtx, tmp_path / "checkpoint")
    prompts = [torch.arange(9), torch.arange(30, 51)]
    arguments = {"seed": 3, "temperatures": torch.zeros(2), "block_size": 5}
    found = drive(interpreted_session(request), prompts, **arguments)  # type: ignore[arg-type]
    expected = drive(torch_session(request), prompts, **arguments)  # type: ignore[arg-type]
    # Rounding to 8 (bf16) or 11 (f16) bits at other places, four layers deep.
    bound = {"bfloat16": 2**-5, "float16": 2**-8}[dtype]
    assert relative_error(found.prefill_logits, expected.prefill_logits) <= bound
    assert relative_error(found.prefill_features, expected.prefill_features) <= bound


@pytest.mark.parametrize("algorithm", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("weights", ["external", "embedded"])
def test_quantised_weights(
    rtx: TensorRTLibrary, tiny_pairs: PairFactory, tmp_path: Path, algorithm: str, weights: str
) -> None:
    pair = tiny_pairs("qwen3-v2")
    convert(str(pair.target), str(pair.drafter), tmp_path / "checkpoint", quantization=algorithm)
    check(*observe(request_of(rtx, tmp_path / "checkpoint", weights=weights), 1))


@pytest.mark.parametrize("algorithm", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("pair", ["qwen3-v2", "qwen3-v1"])
def test_quantised_drafters(tiny_request: RequestFactory, pair: str, algorithm: str) -> None:
    """Beside a target that is not: each projection says itself how it is stored."""
    request = tiny_request(pair)
    assert request.drafter is not None
    check(*observe(replace(request, drafter=quantised_drafter(request.drafter, algorithm)), 1))


def test_demo_pair(rtx: TensorRTLibrary, demo_checkpoint: Callable[[str], Path]) -> None:
    request = request_of(rtx, demo_checkpoint("float32"), limits=native_limits(8, seq_len=120))
    check(*observe(request, 0))

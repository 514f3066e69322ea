"""Networks of the plugin lowering, recorded and computed by the torch definitions of their plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_sessions import drive
from interpreted_session import InterpretedRunner, interpreted_session
from quantised_drafters import quantised_drafter
from recorded_plugins import recorded
from tensorrt_requests import RequestFactory, paged_limits, request_of
from test_native_networks import check
from torch_reference import torch_session

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.engine.paged_session import PagedSession
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.engine.tensorrt_emit import emit_network
from trtllm_dflash.engine.tensorrt_plugin_emit import most_pages
from trtllm_dflash.errors import BuildError, ConfigError
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

PAIRS = ("llama-v2", "qwen3-v1", "qwen3-v2", "llama-v1", "llama-bias")


def plugin_request(request: NetworkRequest, **limits: int) -> NetworkRequest:
    """The request in the plugin lowering, recorded, with paged caches."""
    return recorded(replace(request, limits=paged_limits(request.limits.block_size, **limits)))


def compare(request: NetworkRequest, *, block_size: int | None = None, sizes: tuple[int, ...] = (23, 3, 40)) -> None:
    """The passes on the interpreted networks and on torch."""
    generator = torch.Generator().manual_seed(len(sizes))
    prompts = [torch.randint(request.target_config.vocab_size, (size,), generator=generator) for size in sizes]
    temperatures = torch.tensor([0.0, 0.7, 1.3])[: len(sizes)]
    block = request.limits.block_size if block_size is None else block_size
    arguments = {"seed": 5, "temperatures": temperatures, "block_size": block}
    found = drive(interpreted_session(request), prompts, **arguments)  # type: ignore[arg-type]
    check(found, drive(torch_session(request), prompts, **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", PAIRS)
def test_networks_equal_the_torch_dialect(tiny_request: RequestFactory, pair: str) -> None:
    compare(plugin_request(tiny_request(pair)))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_special_operation_is_a_plugin(tiny_request: RequestFactory, pair: str) -> None:
    request = plugin_request(tiny_request(pair))
    runner = InterpretedRunner(request)
    plugins = {name: [layer.plugin for layer in emitted.network.layers] for name, emitted in runner.emitted.items()}
    assert plugins["target"] == ["DFlashPagedAttention"] * request.target_config.num_layers
    # One launch writes every drafter layer.
    assert plugins["inject"] == ["DFlashKVInjection"]
    assert plugins["draft"].count("DFlashPagedAttention") == request.drafter_facts.num_layers
    assert ("DFlashSelectorWalk" in plugins["draft"]) == (request.drafter_facts.version == 2)
    assert ("DFlashGroupedConv" in plugins["draft"]) == (request.drafter_facts.conv is not None)
    assert "DFlashCandidates" in plugins["draft"]


def test_a_block_shorter_than_the_engines(tiny_request: RequestFactory) -> None:
    compare(plugin_request(tiny_request("qwen3-v2")), block_size=3)


def test_embedded_weights_compute_the_same(tiny_request: RequestFactory) -> None:
    compare(plugin_request(tiny_request("llama-v2", weights="embedded")), sizes=(9, 17))


@pytest.mark.parametrize("algorithm", ["fp8", "int8", "nvfp4"])
def test_quantised_weights_of_both(
    rtx: TensorRTLibrary, tiny_pairs: Callable[[str], Any], tmp_path: Path, algorithm: QuantAlgo
) -> None:
    pair = tiny_pairs("qwen3-v2")
    convert(str(pair.target), str(pair.drafter), tmp_path / "checkpoint", quantization=algorithm)
    request = request_of(rtx, tmp_path / "checkpoint")
    assert request.drafter is not None
    compare(plugin_request(replace(request, drafter=quantised_drafter(request.drafter, algorithm))))


def test_demo_pair(rtx: TensorRTLibrary, demo_checkpoint: Callable[[str], Path]) -> None:
    request = request_of(rtx, demo_checkpoint("float32"))
    compare(plugin_request(request, seq_len=120), sizes=(23, 1))


def test_more_pages_than_the_plans_were_built_for(tiny_request: RequestFactory) -> None:
    request = plugin_request(tiny_request("llama-v2"))
    session = interpreted_session(request)
    assert isinstance(session, PagedSession)
    most = most_pages(request.limits)
    session.allocate_caches(most)
    with pytest.raises(ConfigError, match=f"at most {most}"):
        session.allocate_caches(most + 1)


def test_rtx_has_no_plugin_layers(tiny_request: RequestFactory) -> None:
    with pytest.raises(BuildError, match="no plugin layers") as caught:
        emit_network(replace(tiny_request("llama-v2"), lowering="plugin"), "target")
    assert "TensorRT 11" in str(caught.value.hint)

"""Networks of the plugin lowering, recorded and computed by the torch definitions of their plugins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driven_sessions import drive
from recorded_plugins import RecordedSession
from tensorrt_requests import RequestFactory
from test_native_networks import check
from torch_reference import torch_session

from trtllm_dflash.engine.tensorrt_emit import emit_network
from trtllm_dflash.errors import BuildError


@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v1", "qwen3-v2", "llama-v1"])
def test_networks_equal_the_torch_dialect(tiny_request: RequestFactory, pair: str) -> None:
    request = tiny_request(pair)
    request = replace(request, limits=replace(request.limits, page_tokens=16))
    prompts = [torch.arange(30, 53), torch.arange(3), torch.arange(100, 140)]
    arguments = {"seed": 5, "temperatures": torch.tensor([0.0, 0.7, 1.3]), "block_size": request.limits.block_size}
    session = RecordedSession(request)
    found = drive(session, prompts, **arguments)  # type: ignore[arg-type]
    check(found, drive(torch_session(request), prompts, **arguments))  # type: ignore[arg-type]
    plugins = {name: [layer.plugin for layer in emitted.network.layers] for name, emitted in session.emitted.items()}
    layers = request.target_config.num_layers
    assert plugins["target"] == ["DFlashPagedAttention"] * layers
    # One launch writes every drafter layer.
    assert plugins["inject"] == ["DFlashKVInjection"]
    assert plugins["draft"].count("DFlashPagedAttention") == request.drafter_facts.num_layers
    assert ("DFlashSelectorWalk" in plugins["draft"]) == (request.drafter_facts.version == 2)
    assert ("DFlashGroupedConv" in plugins["draft"]) == (request.drafter_facts.conv is not None)
    assert "DFlashCandidates" in plugins["draft"]


def test_rtx_has_no_plugin_layers(tiny_request: RequestFactory) -> None:
    with pytest.raises(BuildError, match="no plugin layers") as caught:
        emit_network(replace(tiny_request("llama-v2"), lowering="plugin"), "target")
    assert "TensorRT 11" in str(caught.value.hint)

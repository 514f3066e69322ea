"""Emitting one network in either lowering."""

from __future__ import annotations

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import EmittedNetwork, NetworkRequest
from trtllm_dflash.engine.tensorrt_native_emit import emit_native
from trtllm_dflash.engine.tensorrt_plugin_emit import emit_plugin


def emit_network(request: NetworkRequest, name: Network) -> EmittedNetwork:
    """Emit network ``name``.

    Raises:
        BuildError: TensorRT refused a layer, or cannot do what the checkpoint asks for.
    """
    return emit_native(request, name) if request.lowering == "native" else emit_plugin(request, name)

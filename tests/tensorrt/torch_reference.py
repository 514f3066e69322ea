"""The engine of a native request on the torch backend: the definition of right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trtllm_dflash.checkpoint.quantize import SCALE
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.engine.tensorrt_weights import stored_algorithm
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.engine.torch_weights import TorchWeightSource


def torch_session(request: NetworkRequest) -> TorchSession:
    """The same engine on the torch backend, with small pages."""
    device = torch.device("cpu")

    def source(tensors: Mapping[str, Tensor]) -> TorchWeightSource:
        quantised = [name.removesuffix(f".{SCALE}") for name in tensors if name.endswith(f".{SCALE}")]
        algorithms = {stored_algorithm(tensors, name) for name in quantised}
        assert len(algorithms) <= 1
        return TorchWeightSource(tensors, device, request.dtype, *algorithms)

    return TorchSession(
        request.target_config,
        request.drafter_config,
        replace(request.limits, page_tokens=16),
        target=source(request.target),
        drafter=None if request.drafter is None else source(request.drafter),
        device=device,
        dtype=request.dtype,
    )

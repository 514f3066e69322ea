"""The engine of a native request on the torch backend: the definition of right."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.engine.torch_weights import TorchWeightSource


def torch_session(request: NetworkRequest) -> TorchSession:
    """The same engine on the torch backend, with small pages."""
    device = torch.device("cpu")
    drafter = request.drafter
    return TorchSession(
        request.target_config,
        request.drafter_config,
        replace(request.limits, page_tokens=16),
        target=TorchWeightSource(request.target, device, request.dtype, request.quantization),
        drafter=None if drafter is None else TorchWeightSource(drafter, device, request.dtype),
        device=device,
        dtype=request.dtype,
    )

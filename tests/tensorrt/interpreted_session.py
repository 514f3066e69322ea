"""Sessions whose networks are computed by the interpreter: all but TensorRT's kernels and ours is the real thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from network_interpreter import NetworkInterpreter
from recorded_plugins import RecordedInterpreter
from torch import Tensor

from trtllm_dflash.engine.linear_session import LinearSession
from trtllm_dflash.engine.paged_session import PagedSession
from trtllm_dflash.engine.plan_weights import BoundWeights
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.engine.tensorrt_emission import (
    EmittedNetwork,
    NetworkRequest,
    linear_row_tokens,
    rank_drafter,
    rank_target,
)
from trtllm_dflash.engine.tensorrt_emit import emit_network


class InterpretedRunner:
    """``NetworkRunner`` over emitted networks."""

    def __init__(self, request: NetworkRequest, collective: Callable[[str, str, Tensor], Tensor] | None = None) -> None:
        tensors = {"target": request.target, "drafter": request.drafter or {}}
        weights = BoundWeights(tensors, torch.device("cpu"))
        self.emitted: dict[str, EmittedNetwork] = {}
        self.interpreters: dict[str, NetworkInterpreter] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.passes = 0
        for name in request.networks:
            emitted = emit_network(request, name)
            self.emitted[name] = emitted
            interpreter = RecordedInterpreter if request.lowering == "plugin" else NetworkInterpreter
            self.interpreters[name] = interpreter(
                request.library.trt, emitted.network, emitted.writer.constants, collective
            )
            self.weights[name] = weights.bind(emitted.bindings)

    def run(self, network: str, inputs: Mapping[str, Tensor], *, recurring: bool) -> Mapping[str, Tensor]:
        self.passes += 1
        return self.interpreters[network].run({**inputs, **self.weights[network]})

    def close(self) -> None:
        self.interpreters.clear()


def interpreted_session(
    request: NetworkRequest, *, collective: Callable[[str, str, Tensor], Tensor] | None = None
) -> EngineSession:
    """A session of the emitted networks of ``request``; of one rank, its caches have that rank's heads."""
    runner = InterpretedRunner(request, collective)
    configs = (rank_target(request), None if request.drafter_config is None else rank_drafter(request), request.limits)
    place = {"device": torch.device("cpu"), "dtype": request.dtype}
    if request.lowering == "plugin":
        return PagedSession(*configs, runner=runner, **place)
    return LinearSession(*configs, runner=runner, row_tokens=linear_row_tokens(request.limits), **place)

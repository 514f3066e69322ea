"""CUDA graphs: a function of fixed tensors, recorded once and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class CapturedGraph(Generic[Result]):
    """A recorded call: ``replay()`` runs it again on what its input tensors hold then; ``result`` is overwritten."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Result) -> None:
        self._graph = graph
        self.result = result

    def replay(self) -> Result:
        """Enqueue the recorded work on the current stream."""
        self._graph.replay()
        return self.result


class GraphPool:
    """Records graphs that share one memory pool; they run one after the other on one stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.captured = 0

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        """Run ``function`` once eagerly, so that libraries set themselves up, then record it.

        The function must not read device values on the host and must be harmless to run. Its tensors stay alive in the
        graph's pool; what it returns is valid until the next replay of any graph of this pool.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            function()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the GPU while this one records.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                # The capture is lost as well, and says so; what broke it is the error to report.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self.captured += 1
        return CapturedGraph(graph, result)

"""Requests to emit networks, of tiny random pairs and of the demo pair; all skip without TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorrt_requests import RequestFactory, request_of

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.errors import BuildError, CheckpointError
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary, load_tensorrt


@pytest.fixture(scope="session")
def rtx() -> TensorRTLibrary:
    """TensorRT-RTX, or a skip that says how to get it."""
    try:
        return load_tensorrt("tensorrt-rtx")
    except BuildError as problem:
        pytest.skip(f"{problem.message}; {problem.hint}")


@pytest.fixture(scope="session")
def tiny_request(rtx: TensorRTLibrary, tiny_checkpoints: Callable[[str], Path]) -> RequestFactory:
    """``tiny_request(name, **changes)``: a request for a tiny pair."""
    return lambda name, **changes: request_of(rtx, tiny_checkpoints(name), **changes)


@pytest.fixture(scope="session")
def demo_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``demo_checkpoint(dtype)``: the demo pair converted, once per dtype."""
    made: dict[str, Path] = {}

    def checkpoint(dtype: str) -> Path:
        if dtype == "float32":
            return request.getfixturevalue("demo_pair").engines.parent / "checkpoint"  # type: ignore[no-any-return]
        if dtype not in made:
            output = tmp_path_factory.mktemp("demo") / dtype
            try:
                convert("demo", "demo", output, dtype=dtype)
            except CheckpointError as problem:
                pytest.skip(f"the demo pair is not available: {problem}")
            made[dtype] = output
        return made[dtype]

    return checkpoint

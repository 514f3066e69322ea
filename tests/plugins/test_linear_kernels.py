"""The skinny linear kernels against float64 and against the kernels they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_linear, cuda_select
from trtllm_dflash.ops.plugin_library import find_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the plugin library: trtllm-dflash plugins build"),
]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_product(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within one rounding of the type, plus float32 sums of ``sum |x||w|``."""
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    tolerance = expected.abs() * torch.finfo(found.dtype).eps / 2 + size * 2.0**-20
    assert ((found.double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [2, 14, 256, 1024, 2112, 2118, 6144])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("depth", [64, 576, 4096])
def test_linear(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, rows, depth + 8, dtype=dtype)[:, :depth], draw(columns, columns, depth, dtype=dtype)
    room = torch.full((rows, columns + 6), float("nan"), dtype=dtype, device="cuda")
    cuda_linear.linear(x, weight, out=room[:, :columns])
    assert_product(room[:, :columns], x, weight)
    assert room[:, columns:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "block"), [(1, 8), (1, 1), (2, 8), (4, 8), (2, 16), (3, 5)])
@pytest.mark.parametrize(
    ("width", "groups", "taps"), [(4096, 256, 2), (512, 32, 3), (256, 4, 4), (64, 1, 1), (192, 3, 2)]
)
def test_projected_conv(batch: int, block: int, width: int, groups: int, taps: int, dtype: torch.dtype) -> None:
    rows, side = batch * block, taps * groups
    x = draw(rows, rows, width, dtype=dtype)
    weight = (draw(2, 2 * side, width) * width**-0.5).to(dtype)
    base = draw(3, taps, width, dtype=dtype)
    out, behind = cuda_linear.projected_conv(x, weight, base, block)
    dynamic = cuda_linear.linear(x, weight)
    assert_product(dynamic, x, weight)
    torch.testing.assert_close(behind, dynamic[:, side:], atol=2e-2, rtol=2e-2)
    front = cuda_select.grouped_conv(x, dynamic[:, :side], base, block)
    # The sums of the two launches may round to neighbouring values of the type.
    torch.testing.assert_close(out, front, atol=6e-2, rtol=3e-2)


def test_a_result_of_the_launch_in_front_is_seen() -> None:
    """Each product reads the one before it, in one graph: overlapped launches may not read early."""
    weights = [draw(i, 1024, 1024) * 1024**-0.5 for i in range(20)]
    x = draw(99, 8, 1024)

    def chain(multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        hidden = x
        for weight in weights:
            hidden = multiply(hidden, weight)
        return hidden

    chain(cuda_linear.linear)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(cuda_linear.linear)
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(found, chain(torch.nn.functional.linear), atol=5e-2, rtol=5e-2)


def test_unsupported_shapes_are_refused_by_name() -> None:
    with pytest.raises(EngineError, match="33 rows"):
        cuda_linear.linear(draw(0, 33, 64), draw(1, 8, 64))
    with pytest.raises(EngineError, match="96 input columns"):
        cuda_linear.linear(draw(0, 8, 96), draw(1, 8, 96))
    with pytest.raises(EngineError, match="taps 5"):
        cuda_linear.projected_conv(draw(0, 8, 64), draw(1, 10, 64), draw(2, 5, 64), 8)

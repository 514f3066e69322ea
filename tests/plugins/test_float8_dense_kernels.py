"""Dense products with a float8 weight against float64, and rounding to float8 against its definition."""

from __future__ import annotations

import random

import dense_products
import pytest
import torch
from dense_products import PLANS, DrawnProduct, normal, poisoned
from torch import Tensor

from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.ops.torch_dense import Fp8Matrix, fp8_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the plugin library: trtllm-dflash plugins build"),
]

# Qwen3-8B's projections, and shapes with odd edges: half a block of 128 columns at the end, one row, the deepest.
QWEN3_8B = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
SHAPES = (*QWEN3_8B, (1032, 320), (24, 64), (200, 192), (1, 16384))


def random_matrix(generator: torch.Generator, columns: int, depth: int) -> Fp8Matrix:
    """Every finite float8 number, subnormal ones too, and scales of all sizes."""
    codes = torch.randint(0, 254, (columns, depth), generator=generator, device="cuda", dtype=torch.uint8)
    codes += codes >= 127  # 127 and 255 are NaN
    scales = torch.exp(normal(generator, 1, columns) * 2) * 1e-4
    return Fp8Matrix(codes.view(torch.float8_e4m3fn), scales)


def as_float64(matrix: Fp8Matrix) -> Tensor:
    return matrix.values.double() * matrix.scales.double().t()


def assert_product(found: Tensor, x: Tensor, matrix: Fp8Matrix, bias: Tensor | None = None) -> None:
    facts = torch.finfo(found.dtype)
    least = facts.smallest_normal * facts.eps
    dense_products.assert_product(found, x, as_float64(matrix), bias, least=least)


@pytest.mark.parametrize("seed", range(120))
def test_float8_linear(seed: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    drawn = DrawnProduct.linear(seed, SHAPES)
    rng, generator, dtype = drawn.rng, drawn.generator, drawn.dtype
    rows, columns, depth = drawn.rows, drawn.columns, drawn.depth
    padding = rng.choice((0, 8))
    x = normal(generator, rows, depth + padding)[:, :depth]
    if dtype == torch.bfloat16:
        # Halves have less range: rows, and parts of one, of very different sizes.
        x = x * torch.exp(normal(generator, rows, 1) * 10)
        x[:, : depth // 3] *= 1e5
    x = x.to(dtype)
    matrix = random_matrix(generator, columns, depth)
    bias = normal(generator, columns).to(dtype) if rng.random() < 0.3 else None
    wide = poisoned(rows, columns + padding, dtype)
    if rng.random() < 0.5:
        # The first reads of a launch must not run ahead of what the launch in front writes.
        x = x * 1.0

    out = skinny_linear(x, matrix, bias, out=wide[:, :columns])

    assert_product(out, x, matrix, bias)
    assert wide[:, columns:].isnan().all()


@pytest.mark.parametrize("shape", QWEN3_8B)
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_projections_of_qwen3_8b(shape: tuple[int, int], rows: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    generator = torch.Generator("cuda").manual_seed(rows)
    x, matrix = normal(generator, rows, shape[1]).bfloat16(), random_matrix(generator, *shape)
    assert_product(skinny_linear(x, matrix, out=poisoned(rows, shape[0], x.dtype)), x, matrix)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_computes_the_same_product(plan: tuple[int, int, int]) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    generator = torch.Generator("cuda").manual_seed(plan[0])
    for rows in (5, 16, 30):
        x, matrix = normal(generator, rows, 1984).bfloat16(), random_matrix(generator, 5000, 1984)
        assert_product(skinny_linear(x, matrix, out=poisoned(rows, 5000, x.dtype), plan=plan), x, matrix)


@pytest.mark.parametrize("seed", range(40))
def test_gate_up_equals_linear_then_swiglu(seed: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_gate_up, skinny_linear
    from trtllm_dflash.ops.cuda_fused import swiglu

    drawn = DrawnProduct.gated(seed)
    rows, depth, plan = drawn.rows, drawn.depth, drawn.plan()
    x = (normal(drawn.generator, rows, depth) / 4).to(drawn.dtype)
    matrix = random_matrix(drawn.generator, 2 * drawn.columns, depth)

    fused = skinny_gate_up(x, matrix, out=poisoned(rows, drawn.columns, drawn.dtype), plan=plan)

    assert torch.equal(fused, swiglu(skinny_linear(x, matrix, plan=plan)))


def test_a_row_that_is_not_a_number_spoils_no_other() -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    generator = torch.Generator("cuda").manual_seed(3)
    x, matrix = normal(generator, 6, 4096).bfloat16(), random_matrix(generator, 512, 4096)
    matrix.values.view(torch.uint8)[:, 100] = 0x38  # 1
    clean = skinny_linear(x, matrix)
    x[1, 100], x[4, 100] = float("nan"), float("inf")
    out = skinny_linear(x, matrix)
    others = torch.tensor([0, 2, 3, 5], device="cuda")
    assert torch.equal(out[others], clean[others])
    assert out[1].isnan().all()
    assert out[4].isinf().all()


def test_a_chain_in_a_graph_repeats_itself_bit_by_bit() -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_gate_up, skinny_linear
    from trtllm_dflash.ops.cuda_fused import add_rms_norm

    generator = torch.Generator("cuda").manual_seed(5)
    weights = [(random_matrix(generator, 4096, 1024), random_matrix(generator, 1024, 2048)) for _ in range(8)]
    scale = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    start = normal(generator, 16, 1024)

    def chain() -> Tensor:
        residual, fed = start.clone(), None
        for gate_up, down in weights:
            normed = add_rms_norm(fed, residual, scale, 1e-6)
            fed = skinny_linear(skinny_gate_up(normed, gate_up), down)
        return add_rms_norm(fed, residual, scale, 1e-6)

    eager = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)
    assert eager.isfinite().all()


@pytest.mark.parametrize("rows", [1, 16, 17, 200])
def test_the_dialect_takes_the_kernel_for_a_few_rows(rows: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_gate_up, skinny_linear
    from trtllm_dflash.ops.cuda_dialect import CudaOps

    generator = torch.Generator("cuda").manual_seed(rows)
    x, matrix = normal(generator, rows, 512).bfloat16(), random_matrix(generator, 768, 512)
    bias = normal(generator, 768).bfloat16()
    out = CudaOps().linear(x, Linear(matrix, bias))
    if rows <= 16:
        assert torch.equal(out, skinny_linear(x, matrix, bias))
        assert torch.equal(CudaOps().gated(x, Linear(matrix)), skinny_gate_up(x, matrix))
    else:
        # The same rounding of x, but for last places of the scales.
        expected = fp8_linear(x, matrix, bias).float()
        assert (out.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_rounded_to_the_nearest_float8(seed: int) -> None:
    from trtllm_dflash.ops.cuda_dense import quantize_rows

    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, width = rng.randint(1, 600), 8 * rng.choice((1, 7, 512, 1536, rng.randint(1, 2100)))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    x = (normal(generator, rows, width + 8) * torch.exp(normal(generator, rows, 1)))[:, :width].to(dtype)
    x[0] = 0
    if rng.random() < 0.5:
        x = x * 1.0

    values, scales = quantize_rows(x)

    assert values.shape == x.shape
    assert scales.shape == (rows, 1)
    exact = (x.abs().amax(-1, keepdim=True).double() / 448).clamp_min(1e-12)
    assert ((scales.double() - exact).abs() <= exact * 2.0**-22).all()
    # Half a step: 2^-4 of a normal number, 2^-10 of the scale below; the quotient was rounded before.
    error = (values.double() * scales.double() - x.double()).abs()
    step = torch.maximum(x.double().abs() * 2.0**-4, scales.double() * 2.0**-10)
    assert (error <= step * (1 + 2.0**-20)).all()


def test_a_row_with_nan_stays_one() -> None:
    from trtllm_dflash.ops.cuda_dense import quantize_rows

    x = torch.ones(3, 64, dtype=torch.bfloat16, device="cuda")
    x[1, 7] = float("nan")
    values, scales = quantize_rows(x)
    assert (values.float() * scales).isnan().any(-1).tolist() == [False, True, False]


def test_what_does_not_fit_is_refused() -> None:
    from trtllm_dflash.errors import EngineError
    from trtllm_dflash.ops.cuda_dense import quantize_rows, skinny_linear

    generator = torch.Generator("cuda").manual_seed(0)
    matrix = random_matrix(generator, 8, 64)
    x = torch.zeros(33, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(EngineError, match="33 rows"):
        skinny_linear(x, matrix)
    with pytest.raises(EngineError, match=r"scales: got \(8, 1\)"):
        skinny_linear(x[:1], Fp8Matrix(matrix.values, matrix.scales.t()))
    with pytest.raises(EngineError, match=r"weight: got torch\.uint8"):
        skinny_linear(x[:1], Fp8Matrix(matrix.values.view(torch.uint8), matrix.scales))
    with pytest.raises(EngineError, match="width 12"):
        quantize_rows(torch.zeros(2, 12, dtype=torch.bfloat16, device="cuda"))

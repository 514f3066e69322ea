"""Dense products of a few rows against float64, and the fused gate against its own two halves."""

from __future__ import annotations

import dense_products
import pytest
import torch
from dense_products import PLANS, DrawnProduct, normal, poisoned
from torch import Tensor

from trtllm_dflash.ops.plugin_library import find_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the plugin library: trtllm-dflash plugins build"),
]

# Qwen3-8B's projections, the drafter's small ones, and shapes with odd edges.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (256, 4096), (1032, 320), (24, 64), (1, 16384))


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    dense_products.assert_product(found, x, weight, bias, least=1e-7)


@pytest.mark.parametrize("seed", range(150))
def test_skinny_linear(seed: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    drawn = DrawnProduct.linear(seed, SHAPES)
    rng, generator, dtype = drawn.rng, drawn.generator, drawn.dtype
    rows, columns, depth = drawn.rows, drawn.columns, drawn.depth
    padding = rng.choice((0, 8))
    x = normal(generator, rows, depth + padding).to(dtype)[:, :depth]
    weight = (0.05 * normal(generator, columns, depth)).to(dtype)
    bias = normal(generator, columns).to(dtype) if rng.random() < 0.3 else None
    wide = poisoned(rows, columns + padding, dtype)
    if rng.random() < 0.5:
        # The first reads of a launch must not run ahead of what the launch in front writes.
        x = x * 1.0

    out = skinny_linear(x, weight, bias, out=wide[:, :columns])

    assert_product(out, x, weight, bias)
    assert wide[:, columns:].isnan().all()


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_computes_the_same_product(plan: tuple[int, int, int]) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    generator = torch.Generator("cuda").manual_seed(plan[0])
    for rows in (5, 16, 30):
        x = normal(generator, rows, 1984).bfloat16()
        weight = (0.05 * normal(generator, 5000, 1984)).bfloat16()
        out = skinny_linear(x, weight, out=poisoned(rows, 5000, x.dtype), plan=plan)
        assert_product(out, x, weight, None)


@pytest.mark.parametrize("seed", range(60))
def test_gate_up_equals_linear_then_swiglu(seed: int) -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_gate_up, skinny_linear
    from trtllm_dflash.ops.cuda_fused import swiglu

    drawn = DrawnProduct.gated(seed)
    rows, depth, plan = drawn.rows, drawn.depth, drawn.plan()
    x = normal(drawn.generator, rows, depth).to(drawn.dtype)
    weight = (0.05 * normal(drawn.generator, 2 * drawn.columns, depth)).to(drawn.dtype)

    fused = skinny_gate_up(x, weight, out=poisoned(rows, drawn.columns, drawn.dtype), plan=plan)

    assert torch.equal(fused, swiglu(skinny_linear(x, weight, plan=plan)))


def test_a_chain_in_a_graph_repeats_itself_bit_by_bit() -> None:
    from trtllm_dflash.ops.cuda_dense import skinny_gate_up, skinny_linear
    from trtllm_dflash.ops.cuda_fused import add_rms_norm

    generator = torch.Generator("cuda").manual_seed(5)
    weights = [
        ((normal(generator, 4096, 1024) / 32).bfloat16(), (normal(generator, 1024, 2048) / 45).bfloat16())
        for _ in range(8)
    ]
    scale = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    start = normal(generator, 16, 1024)

    def chain() -> Tensor:
        residual, fed = start.clone(), None
        for gate_up, down in weights:
            normed = add_rms_norm(fed, residual, scale, 1e-6)
            fed = skinny_linear(skinny_gate_up(normed, gate_up), down)
        return add_rms_norm(fed, residual, scale, 1e-6)

    def definition() -> Tensor:
        residual, fed = start.clone(), torch.zeros(16, 1024, dtype=torch.bfloat16, device="cuda")
        for gate_up, down in weights:
            residual = residual + fed.float()
            normed = torch.nn.functional.rms_norm(residual, (1024,), None, 1e-6).bfloat16()
            gate, up = (normed.float() @ gate_up.float().t()).bfloat16().float().chunk(2, dim=-1)
            fed = ((gate * gate.sigmoid() * up).bfloat16().float() @ down.float().t()).bfloat16()
        return torch.nn.functional.rms_norm(residual + fed.float(), (1024,), None, 1e-6)

    eager = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)
    # Eight layers of bfloat16 results, each within half a last place of the definition's.
    assert (eager.float() - definition()).norm() / definition().norm() < 0.02


def test_what_does_not_fit_is_refused() -> None:
    from trtllm_dflash.errors import EngineError
    from trtllm_dflash.ops.cuda_dense import skinny_linear

    x = torch.zeros(33, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(EngineError, match="33 rows"):
        skinny_linear(x, torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(EngineError, match="depth 72"):
        skinny_linear(x[:1, :1].expand(1, 72).contiguous(), torch.zeros(8, 72, dtype=torch.bfloat16, device="cuda"))
    deep = torch.zeros(1, 12288, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(EngineError, match="a cluster of 1 is too small"):
        skinny_linear(deep, torch.zeros(8, 12288, dtype=torch.bfloat16, device="cuda"), plan=(1, 0, 0))
    with pytest.raises(EngineError, match="weight"):
        skinny_linear(x[:4], torch.zeros(8, 128, dtype=torch.bfloat16, device="cuda"))

"""Dense operations and block plumbing of the torch dialect against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.torch_dense import pack_matrix
from trtllm_dflash.ops.torch_dialect import TorchOps

OPS = TorchOps()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("packed", [False, True])
def test_linear(rows: int, bias: bool, packed: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 24, generator=generator), torch.randn(40, 24, generator=generator)
    offset = torch.randn(40, generator=generator) if bias else None
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0.0)
    found = OPS.linear(x, Linear(pack_matrix(weight) if packed else weight, offset))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_weights_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 16, generator=generator).to(x_dtype)
    weight = torch.randn(16, generator=generator).to(weight_dtype)
    found = OPS.rms_norm(x, weight, 1e-5)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert found.dtype == weight_dtype
    # Two roundings to bfloat16 (8 bits of significand) at most.
    tolerance = 1e-5 if found.dtype == torch.float32 else 2 * 2.0**-8
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


def test_rotary_rotates_pairs_and_leaves_the_rest() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, 10, generator=generator)
    angles = torch.rand(20, 3, generator=generator) * 6
    positions = torch.tensor([4, 0, 19])
    rows = OPS.rotary_rows(torch.cat((angles.cos(), angles.sin()), dim=-1), positions)
    found = OPS.rotary(x, rows)
    for n, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(3):
                angle = float(angles[position, pair])
                a, b = float(x[n, head, pair]), float(x[n, head, pair + 3])
                rotated = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
                assert float(found[n, head, pair]) == pytest.approx(rotated[0], abs=1e-5)
                assert float(found[n, head, pair + 3]) == pytest.approx(rotated[1], abs=1e-5)
    assert torch.equal(found[..., 6:], x[..., 6:])


def test_swiglu_takes_the_gate_first() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    expected = [1.0 / (1 + math.exp(-1.0)) * 3.0, -2.0 / (1 + math.exp(2.0)) * 0.5]
    assert OPS.swiglu(x)[0].tolist() == pytest.approx(expected)


def test_gated_is_swiglu_of_the_projection() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 24, generator=generator), torch.randn(32, 24, generator=generator)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    found = OPS.gated(x, Linear(weight, None))
    torch.testing.assert_close(found.double(), gate * torch.sigmoid(gate) * up, atol=1e-4, rtol=0)


def test_softcap() -> None:
    x = torch.tensor([0.0, 5.0, -100.0])
    assert OPS.softcap(x, 20.0).tolist() == pytest.approx([0.0, math.tanh(0.25) * 20, math.tanh(-5.0) * 20])


def test_adding_to_a_float32_stream_keeps_it() -> None:
    assert OPS.add(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


def test_block_plumbing() -> None:
    assert OPS.block_ids(torch.tensor([7, 8]), 3, 4).tolist() == [7, 3, 3, 3, 8, 3, 3, 3]
    assert OPS.block_positions(torch.tensor([10, 0]), 3).tolist() == [10, 11, 12, 0, 1, 2]
    rows = torch.arange(12).view(6, 2)
    assert OPS.proposal_rows(rows, 3).tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert OPS.per_request(rows, 3).shape == (2, 3, 2)


def test_heads_are_columns() -> None:
    x = torch.arange(24).view(2, 12)
    assert OPS.heads(x, 1, 2, 3).tolist() == [[[3, 4, 5], [6, 7, 8]], [[15, 16, 17], [18, 19, 20]]]
    assert torch.equal(OPS.merge_heads(OPS.heads(x, 0, 4, 3)), x)


def test_offsets_of_a_reduced_vocabulary() -> None:
    assert OPS.add_offsets(torch.tensor([[0], [2]]), torch.tensor([5, 5, 40])).tolist() == [[5], [42]]

"""What the bindings of the dense products take and refuse, without a GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_dense
from trtllm_dflash.ops.torch_dense import Fp8Matrix


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_takes_names_what_the_kernel_can_do() -> None:
    x, weight = zeros(8, 64), zeros(8, 64)
    assert cuda_dense.takes(x, weight)
    assert not cuda_dense.takes(zeros(cuda_dense.MAX_ROWS + 1, 64), weight)
    assert not cuda_dense.takes(x.float(), weight.float())
    assert not cuda_dense.takes(zeros(8, 96), zeros(8, 96))
    assert not cuda_dense.takes(x, zeros(64, 8).t())
    assert not cuda_dense.takes(x.half(), weight)


def test_worthwhile_leaves_many_rows_to_cublas() -> None:
    weight = zeros(4096, 64)
    for one in (weight, Fp8Matrix(weight.to(torch.float8_e4m3fn), torch.ones(1, 4096))):
        assert cuda_dense.worthwhile(zeros(16, 64), one)
        assert not cuda_dense.worthwhile(zeros(17, 64), one)


def test_which_float8_weights_are_taken() -> None:
    matrix = Fp8Matrix(zeros(4096, 64).to(torch.float8_e4m3fn), torch.ones(1, 4096))
    assert cuda_dense.takes(zeros(32, 64), matrix)
    assert cuda_dense.takes(zeros(32, 64, dtype=torch.float16), matrix)
    assert not cuda_dense.takes(zeros(33, 64), matrix)
    assert not cuda_dense.takes(zeros(8, 64).float(), matrix)
    assert not cuda_dense.takes(zeros(8, 64), Fp8Matrix(matrix.values, torch.ones(2, 4096)[:, ::2]))
    assert not cuda_dense.takes(zeros(8, 64), Fp8Matrix(matrix.values, matrix.scales.double()))


def test_a_tensor_that_is_not_on_a_gpu_is_refused() -> None:
    with pytest.raises(EngineError, match=r"x: got .* on cpu"):
        cuda_dense.skinny_linear(zeros(8, 64), zeros(8, 64))
    with pytest.raises(EngineError, match=r"x: got .* on cpu"):
        cuda_dense.quantize_rows(zeros(8, 64))


def test_gate_and_up_need_an_even_number_of_rows() -> None:
    with pytest.raises(EngineError, match=r"weight: got \(7, 64\), expected an even number of rows"):
        cuda_dense.skinny_gate_up(zeros(8, 64), zeros(7, 64))

"""What the bindings of the skinny linear kernels take and refuse, without a GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_linear


def test_operands_that_do_not_match_are_refused() -> None:
    with pytest.raises(EngineError, match="weight"):
        cuda_linear.linear(torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 128, dtype=torch.bfloat16))
    with pytest.raises(EngineError, match="x: is on cpu"):
        cuda_linear.linear(torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16))


def test_fits_names_what_linear_takes() -> None:
    x, weight = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert cuda_linear.fits(x, weight)
    assert not cuda_linear.fits(x.repeat(5, 1), weight)
    assert not cuda_linear.fits(x.float(), weight.float())
    assert not cuda_linear.fits(x[:, :40], weight[:, :40])


def test_prefers_names_where_linear_was_faster_than_cublas() -> None:
    x, wide = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(4096, 64, dtype=torch.bfloat16)
    assert cuda_linear.is_faster(x, wide)
    assert not cuda_linear.is_faster(x.repeat(2, 1), wide)
    assert cuda_linear.is_faster(x.repeat(2, 1), wide[:1024])

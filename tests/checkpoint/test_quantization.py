"""Weight quantisation: formats, error bounds and round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.quantize import SCALE, SCALE_2, WEIGHT, dequantize, quantize, quantized_specs
from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.config.mapping import QuantAlgo

ALGOS: list[QuantAlgo] = ["fp8", "int8", "nvfp4"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_weight(seed: int, rows: int = 24, columns: int = 64, spread: float = 2.0) -> torch.Tensor:
    """Rows of very different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(spread * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * magnitudes


def half_step(weight: torch.Tensor, algo: QuantAlgo, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Largest rounding error of each element, from the definition of the formats."""
    if algo == "int8":
        return 0.5 * tensors[SCALE][:, None].expand_as(weight)
    if algo == "fp8":
        # e4m3 has 3 mantissa bits: half a unit is 2^-4 relative, 2^-10 absolute among subnormals.
        return torch.maximum(weight.abs() * 2.0**-4, 2.0**-10 * tensors[SCALE][:, None])
    scale = tensors[SCALE].float().repeat_interleave(16, dim=1) * tensors[SCALE_2]
    # The largest gap of e2m1 is 2 (from 4 to 6); a block scale rounded down by 2^-4 clips its maximum at 6.
    return scale * 1.0 + (weight.abs() - 6 * scale).clamp_min(0)


@pytest.mark.parametrize("algo", ALGOS)
@given(seed=st.integers(0, 2**31))
def test_error_is_at_most_half_a_step(algo: QuantAlgo, seed: int) -> None:
    weight = random_weight(seed)
    tensors = quantize(weight, algo)
    error = (dequantize(tensors, algo) - weight).abs()
    # Scales, quotients and products are rounded in float32 themselves: of values up to 127 steps, some 1e-5 of a step.
    assert (error <= half_step(weight, algo, tensors) * (1 + 1e-4)).all()


@pytest.mark.parametrize(("algo", "largest"), [("fp8", 0.04), ("int8", 0.02), ("nvfp4", 0.15)])
def test_relative_error_of_gaussian_weights(algo: QuantAlgo, largest: float) -> None:
    weight = random_weight(3, rows=256, columns=1024, spread=0.0)
    error = dequantize(quantize(weight, algo), algo) - weight
    assert error.norm() / weight.norm() < largest


@pytest.mark.parametrize("algo", ALGOS)
def test_specs_are_what_quantize_makes(algo: QuantAlgo) -> None:
    tensors = quantize(random_weight(0), algo)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()} == quantized_specs((24, 64), algo)


@pytest.mark.parametrize("algo", ALGOS)
def test_zero_rows_and_zero_weights(algo: QuantAlgo) -> None:
    weight = random_weight(0)
    weight[3] = 0
    back = dequantize(quantize(weight, algo), algo)
    assert not back[3].any()
    assert torch.isfinite(back).all()
    assert not dequantize(quantize(torch.zeros(2, 32), algo), algo).any()


@pytest.mark.parametrize("algo", ALGOS)
def test_quantising_twice_changes_nothing(algo: QuantAlgo) -> None:
    once = dequantize(quantize(random_weight(5), algo), algo)
    twice = dequantize(quantize(once, algo), algo)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("algo", ALGOS)
def test_largest_magnitude_of_a_row_survives(algo: QuantAlgo) -> None:
    weight = random_weight(7, spread=0.0)
    back = dequantize(quantize(weight, algo), algo)
    place = weight.abs().argmax(dim=1, keepdim=True)
    tolerance = 2.0**-4 if algo == "nvfp4" else 1e-6
    torch.testing.assert_close(back.gather(1, place), weight.gather(1, place), rtol=tolerance, atol=0)


def test_nvfp4_bytes() -> None:
    """Low nibble first; code = sign bit 3, magnitude index in bits 0..2; scales exact where they can be."""
    values = torch.tensor([E2M1 + [-value for value in E2M1]])
    tensors = quantize(values * 448, "nvfp4")
    assert float(tensors[SCALE_2]) == 1.0
    assert tensors[SCALE].float().tolist() == [[448.0]]
    # -0.0 keeps its sign bit (code 8).
    assert tensors[WEIGHT].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(dequantize(tensors, "nvfp4"), values * 448)


def test_nvfp4_ties_go_to_even() -> None:
    """Midpoints between neighbours of e2m1 round to the even code, as IEEE 754 does."""
    midpoints = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 8])
    rounded = dequantize(quantize(midpoints * 448, "nvfp4"), "nvfp4") / 448
    assert rounded[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize("algo", ["fp8", "int8"])
def test_one_scale_per_output_channel(algo: QuantAlgo) -> None:
    weight = torch.tensor([[1.0, -2.0], [1000.0, 500.0]])
    limit = 448 if algo == "fp8" else 127
    torch.testing.assert_close(quantize(weight, algo)[SCALE], torch.tensor([2.0, 1000.0]) / limit)


@pytest.mark.parametrize("algo", ALGOS)
def test_converted_checkpoint(tmp_path: Path, target: Path, drafter: Path, algo: QuantAlgo) -> None:
    """The five linears of each target layer are quantised and nothing else, the drafter not at all."""
    convert(str(target), str(drafter), tmp_path / "out", quantization=algo)
    checkpoint, source = open_checkpoint(tmp_path / "out"), load_file(target / "model.safetensors")
    assert checkpoint.quantization.algo == algo
    tensors = checkpoint.tensors("target")
    linears = {name.removesuffix(f".{SCALE}") for name in tensors if name.endswith(SCALE)}
    layers = checkpoint.target_config.num_layers
    names = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
    assert linears == {f"transformer.layers.{n}.{name}" for n in range(layers) for name in names}
    assert not any("scaling" in name for name in checkpoint.tensors("drafter"))
    assert tensors["lm_head.weight"].dtype == torch.float32
    linear = "transformer.layers.2.attention.qkv"
    endings = (WEIGHT, SCALE, SCALE_2) if algo == "nvfp4" else (WEIGHT, SCALE)
    qkv = torch.cat([source[f"model.layers.2.self_attn.{p}_proj.weight"] for p in "qkv"])
    parts = {ending: tensors[f"{linear}.{ending}"] for ending in endings}
    assert torch.equal(dequantize(parts, algo), dequantize(quantize(qkv, algo), algo))

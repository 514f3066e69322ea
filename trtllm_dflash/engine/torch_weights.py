"""Weights of the torch backend: checkpoint tensors by name, dequantised, placed and packed for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_dflash.checkpoint.quantize import SCALE, SCALE_2, WEIGHT, dequantize
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.torch_dense import Fp8Matrix, pack_matrix


class TorchWeightSource:
    """``WeightSource[Tensor]`` over a lazy mapping of checkpoint tensors.

    Args:
        tensors: name → tensor, read on access.
        device: where weights go.
        dtype: compute dtype of floating-point weights.
        quantization: algorithm of the quantised projections; they are computed dequantised, except fp8 on a GPU that
            multiplies float8 (SM 89 and newer).
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        quantization: QuantAlgo = "none",
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._quantization: QuantAlgo = quantization
        self._keep_fp8 = quantization == "fp8" and multiplies_fp8(device)
        self._plain: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self._plain:
            tensor = self._tensors[name]
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            self._plain[name] = tensor.to(device=self._device, dtype=dtype)
        return self._plain[name]

    def linear(self, names: list[str], *, bias: bool = False, rows: tuple[int, int] | None = None) -> Linear[Tensor]:
        def cut(tensor: Tensor) -> Tensor:
            return tensor if rows is None else tensor[rows[0] : rows[1]]

        biases = [cut(self._tensors[f"{name}.bias"]) for name in names] if bias else []
        stacked = torch.cat(biases).to(device=self._device, dtype=self._dtype) if biases else None
        if self._keep_fp8 and all(f"{name}.{SCALE}" in self._tensors for name in names):
            values = torch.cat([cut(self._tensors[f"{name}.{WEIGHT}"]).view(torch.uint8) for name in names])
            scales = torch.cat([cut(self._tensors[f"{name}.{SCALE}"]) for name in names])
            return Linear(
                Fp8Matrix(
                    values.to(self._device).view(torch.float8_e4m3fn),
                    scales.to(device=self._device, dtype=torch.float32).unsqueeze(0),
                ),
                stacked,
            )
        matrices = [cut(self._matrix(name)) for name in names]
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return Linear(pack_matrix(weight.to(device=self._device, dtype=self._dtype)), stacked)

    def _matrix(self, name: str) -> Tensor:
        if f"{name}.{SCALE}" in self._tensors:
            parts = {
                ending: self._tensors[f"{name}.{ending}"]
                for ending in (WEIGHT, SCALE, SCALE_2)
                if f"{name}.{ending}" in self._tensors
            }
            return dequantize(parts, self._quantization, self._dtype)
        weight = f"{name}.weight"
        return self._plain[weight] if weight in self._plain else self._tensors[weight]


def multiplies_fp8(device: torch.device) -> bool:
    """Whether ``device`` has a row-wise scaled float8 product."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

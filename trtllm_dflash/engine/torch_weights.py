"""Weights of the torch backend: checkpoint tensors by name, dequantised, placed and packed for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.torch_dense import pack_matrix

_SCALE = ".weights_scaling_factor"


class TorchWeightSource:
    """``WeightSource[Tensor]`` over a lazy mapping of checkpoint tensors.

    Args:
        tensors: name → tensor, read on access.
        device: where weights go.
        dtype: compute dtype of floating-point weights.
        dequantize: ``(tensors, name, dtype) → [out, in]`` for quantised projections.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        dequantize: Callable[[Mapping[str, Tensor], str, torch.dtype], Tensor],
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._dequantize = dequantize
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

        matrices = [cut(self._matrix(name)) for name in names]
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        biases = [cut(self._tensors[f"{name}.bias"]) for name in names] if bias else []
        stacked = torch.cat(biases).to(device=self._device, dtype=self._dtype) if biases else None
        return Linear(pack_matrix(weight.to(device=self._device, dtype=self._dtype)), stacked)

    def _matrix(self, name: str) -> Tensor:
        weight = f"{name}.weight"
        if weight in self._plain:
            return self._plain[weight]
        if f"{name}{_SCALE}" in self._tensors:
            return self._dequantize(self._tensors, name, self._dtype)
        return self._tensors[weight]

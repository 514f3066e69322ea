"""Binding a plan's weight inputs to the tensors of a rank file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trtllm_dflash.engine.plan_facts import WeightBinding
from trtllm_dflash.errors import EngineError

# TensorRT reads inputs at addresses that are multiples of this.
_ALIGNMENT = 256


class BoundWeights:
    """Weights on a device, each tensor of a rank file loaded once and shared by every network that names it.

    Args:
        tensors: ``target`` and ``drafter`` → name → tensor, read on access. device: where weights go.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._loaded: dict[tuple[str, str], Tensor] = {}
        self.copied_bytes = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of what was bound so far, copies included."""
        return sum(tensor.nbytes for tensor in self._loaded.values()) + self.copied_bytes

    def bind(self, bindings: Iterable[WeightBinding]) -> dict[str, Tensor]:
        """Input name → tensor. Parts are views; only one that starts at an odd address is copied.

        Raises:
            EngineError: the rank file does not fit the plan.
        """
        return {binding.input: self._part(binding) for binding in bindings}

    def _part(self, binding: WeightBinding) -> Tensor:
        tensor = self._whole(binding.model, binding.tensor)
        if binding.rows is not None:
            tensor = tensor[binding.rows[0] : binding.rows[1]]
        if binding.index is not None:
            tensor = tensor[binding.index]
        shape = list(binding.shape)
        if binding.dtype == "fp4":
            shape[-1] //= 2
        if tensor.numel() != torch.Size(shape).numel():
            raise EngineError(
                f"weight '{binding.tensor}' of the {binding.model}: found shape {list(tensor.shape)}, the plan's input "
                f"'{binding.input}' has {list(binding.shape)}",
                hint="the weights and the plan are of different checkpoints; build again",
            )
        tensor = tensor.reshape(shape)
        if self._device.type == "cuda" and tensor.data_ptr() % _ALIGNMENT:
            tensor = tensor.clone()
            self.copied_bytes += tensor.nbytes
        return tensor

    def _whole(self, model: str, name: str) -> Tensor:
        key = (model, name)
        if key not in self._loaded:
            try:
                tensor = self._tensors[model][name]
            except KeyError:
                raise EngineError(
                    f"the {model}'s rank file has no tensor '{name}', which the plan needs",
                    hint="the weights and the plan are of different checkpoints; build again",
                ) from None
            self._loaded[key] = tensor.to(self._device)
        return self._loaded[key]

"""Sessions on weights that nobody trained: for measuring a shape whose checkpoint is not at hand.

What such a pair generates is noise, so its acceptance has to be forced (``EngineOptions.forced_acceptance``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trtllm_dflash.checkpoint.drafter_plan import plan_drafter
from trtllm_dflash.checkpoint.quantize import SCALE, WEIGHT
from trtllm_dflash.checkpoint.target_plan import plan_target
from trtllm_dflash.checkpoint.tensor_plan import Plan, PlannedTensor
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.torch_session import KernelChoice, TorchSession
from trtllm_dflash.engine.torch_weights import TorchWeightSource

_STD = 0.02
# Of stored float8 values: the largest, 448, is more than seven of these away.
_FP8_STD = 60.0


class RandomTensors(Mapping[str, Tensor]):
    """The tensors of a plan, drawn on the device when they are read.

    Matrices are normal with standard deviation 0.02, norms are ones.

    Args:
        plan: names and shapes. quantization: ``none`` or ``fp8`` (values and scales per output row).
    """

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype, quantization: QuantAlgo = "none") -> None:
        self._device = device
        self._dtype = dtype
        self._planned: dict[str, tuple[PlannedTensor, str]] = {}
        for tensor in plan.tensors:
            if tensor.quantize and quantization == "fp8":
                stem = tensor.name.removesuffix(f".{WEIGHT}")
                self._planned[f"{stem}.{WEIGHT}"] = (tensor, WEIGHT)
                self._planned[f"{stem}.{SCALE}"] = (tensor, SCALE)
            else:
                self._planned[tensor.name] = (tensor, "")

    def __getitem__(self, name: str) -> Tensor:
        planned, ending = self._planned[name]
        if ending == SCALE:
            return torch.full(planned.shape[:1], _STD / _FP8_STD, dtype=torch.float32, device=self._device)
        if len(planned.shape) == 1:
            return torch.ones(planned.shape, dtype=self._dtype, device=self._device)
        drawn = torch.empty(planned.shape, dtype=self._dtype, device=self._device).normal_(0.0, _STD)
        return (drawn * (_FP8_STD / _STD)).to(torch.float8_e4m3fn) if ending == WEIGHT else drawn

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)


def random_session(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    limits: BuildLimits,
    *,
    device: torch.device,
    kernels: KernelChoice = "auto",
    quantization: QuantAlgo = "none",
    target_cache_dtype: torch.dtype | None = None,
) -> TorchSession:
    """A torch session of these shapes with random weights in the target's dtype; ``quantization`` is the target's."""
    dtype = getattr(torch, target.dtype)

    def source(plan: Plan, algo: QuantAlgo) -> TorchWeightSource:
        return TorchWeightSource(RandomTensors(plan, device, dtype, algo), device, dtype, algo)

    drafter_source = None
    if drafter is not None:
        plan = plan_drafter(drafter, set(), source_vocab_size=drafter.vocab_size)
        drafter_source = source(plan, "none")
    return TorchSession(
        target,
        drafter,
        limits,
        target=source(plan_target(target, 1), quantization),
        drafter=drafter_source,
        device=device,
        dtype=dtype,
        kernels=kernels,
        target_cache_dtype=target_cache_dtype,
    )

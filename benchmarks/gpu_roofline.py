"""What a cycle must at least move and multiply, and what the device at hand can do; both measured or counted here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.target import TargetConfig


@dataclass(frozen=True)
class DeviceCeilings:
    """``bytes_per_s``: a device-to-device copy, read plus written. ``flops_per_s``: a bf16 product of 8192 cubed."""

    bytes_per_s: float
    flops_per_s: float


def measure_ceilings(device: torch.device, repeats: int = 11) -> DeviceCeilings:
    """Medians on random data; the copy is of 2 GiB, far beyond any cache."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source), repeats)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = _median_seconds(lambda: a @ b, repeats)
    return DeviceCeilings(2 * source.numel() / copy, 2 * 8192**3 / product)


def _median_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(marks)) / 1e3


@dataclass(frozen=True)
class CycleCost:
    """Bytes read and floating-point operations of one cycle."""

    weight_bytes: float
    cache_bytes: float
    flops: float

    def seconds(self, ceilings: DeviceCeilings) -> tuple[float, float]:
        """By bytes, by operations."""
        return (self.weight_bytes + self.cache_bytes) / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s


def cycle_cost(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    batch: int,
    block_size: int,
    context: int,
    matrix_bytes: float = 2,
    cache_bytes: float = 2,
) -> CycleCost:
    """Every weight is read once per pass that needs it, every cached row once; activations count as free.

    With block size 1 nothing is drafted, but the drafter's injection still runs, since its cache must stay valid.

    Args:
        matrix_bytes: bytes of an element of the target's layer matrices. cache_bytes: of the target's cache.
    """
    target_layers = target.num_layers * _layer_elements(target)
    head = target.vocab_size * target.hidden_size
    rows = batch * block_size
    weights = target_layers * matrix_bytes + head * 2
    operations = 2 * rows * (target_layers + head)
    cached = batch * context * 2 * target.num_layers * target.num_kv_heads * target.head_dim * cache_bytes
    if drafter is not None:
        inject = drafter.hidden_size * len(drafter.target_layer_ids) * drafter.target_hidden_size
        inject += drafter.num_layers * 2 * drafter.num_kv_heads * drafter.head_dim * drafter.hidden_size
        weights += inject * 2
        operations += 2 * rows * inject
        if block_size > 1:
            layers = drafter.num_layers * _layer_elements(drafter)
            if drafter.conv is not None:
                groups = drafter.hidden_size // drafter.conv.group_size
                layers += drafter.num_layers * 2 * 2 * drafter.conv.kernel_size * groups * drafter.hidden_size
            weights += (layers + head) * 2
            operations += 2 * rows * layers + 2 * batch * (block_size - 1) * head
            cached += batch * context * 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * 2
    return CycleCost(weights, cached, operations)


def _layer_elements(config: TargetConfig | DrafterConfig) -> int:
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)

"""What sessions of emitted networks share: a runner of networks on named tensors, both caches, and rotation tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.model.rope import cos_sin_table
from trtllm_dflash.ops.interface import CacheLayer


class NetworkRunner(Protocol):
    """Computes one network on named tensors; knows its weights. Cache outputs share their inputs' memory."""

    def run(self, network: Network, inputs: Mapping[str, Tensor], *, recurring: bool) -> Mapping[str, Tensor]:
        """Outputs by name; cache tensors among ``inputs`` are updated in place.

        ``recurring``: passes of these shapes come again and again (draft, verify and its injection), so that it pays
        to prepare them.
        """

    def close(self) -> None:
        """Release device memory."""


class NetworkSession:
    """The part of ``EngineSession`` that does not depend on the kind of cache.

    Args:
        target_config, drafter_config: what runs. limits: the engine's.
        runner: computes the networks. device: of every tensor. dtype: of caches and features.
        positions: rows of the rotation tables. row_tokens: cache positions that one page takes.
        weight_bytes: what the runner's weights take on the device, for the memory plan.
    """

    # Logits are float32 and passes are not recorded from outside.
    uses_kernels = False

    def __init__(
        self,
        target_config: TargetConfig,
        drafter_config: DrafterConfig | None,
        limits: BuildLimits,
        *,
        runner: NetworkRunner,
        device: torch.device,
        dtype: torch.dtype,
        positions: int,
        row_tokens: int,
        weight_bytes: int = 0,
    ) -> None:
        self.target_config = target_config
        self.drafter_config = drafter_config
        self.limits = limits
        self.device = device
        self.dtype = dtype
        self._runner = runner
        self._row_tokens = row_tokens
        self._weight_bytes = weight_bytes
        self._target_caches: Sequence[CacheLayer[Tensor]] = ()
        self._drafter_caches: Sequence[CacheLayer[Tensor]] = ()
        self._target_rope = _rotary_inputs(target_config, positions, device)
        self._drafter_rope = {} if drafter_config is None else _rotary_inputs(drafter_config, positions, device)

    def weight_bytes(self) -> int:
        """Bytes of the runner's weights."""
        return self._weight_bytes

    def cache_bytes_per_page(self) -> int:
        """Bytes of one page over both caches and all layers."""
        heads = self.target_config.num_layers * self.target_config.num_kv_heads * self.target_config.head_dim
        if self.drafter_config is not None:
            drafter = self.drafter_config
            heads += drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
        return 2 * heads * self._row_tokens * self.dtype.itemsize

    def _cache_shape(self, pages: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K or V of one layer with ``pages`` pages, the scratch page among them."""
        raise NotImplementedError

    def allocate_caches(self, num_pages: int) -> None:
        """Allocate ``num_pages`` pages and the scratch page, zeroed: what is masked must not be NaN."""

        def layers(config: TargetConfig | DrafterConfig) -> list[CacheLayer[Tensor]]:
            shape = self._cache_shape(num_pages + 1, config.num_kv_heads, config.head_dim)
            return [
                CacheLayer(
                    torch.zeros(shape, dtype=self.dtype, device=self.device),
                    torch.zeros(shape, dtype=self.dtype, device=self.device),
                )
                for _ in range(config.num_layers)
            ]

        self._target_caches = layers(self.target_config)
        self._drafter_caches = () if self.drafter_config is None else layers(self.drafter_config)

    @property
    def target_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The target's cache layers."""
        return self._target_caches

    @property
    def drafter_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The drafter's cache layers."""
        return self._drafter_caches

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero ``pages`` in both caches."""
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            for cache in (*self._target_caches, *self._drafter_caches):
                cache.k.index_fill_(0, index, 0)
                cache.v.index_fill_(0, index, 0)

    def _features(self, outputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        """The target's features as ``[tokens, F * H]``; no columns without a drafter."""
        if "features" not in outputs:
            return torch.empty(tokens, 0, dtype=self.dtype, device=self.device)
        return outputs["features"].reshape(-1, outputs["features"].shape[-1])

    def close(self) -> None:
        """Release caches and plans."""
        self._target_caches = ()
        self._drafter_caches = ()
        self._runner.close()


def cache_inputs(caches: Sequence[CacheLayer[Tensor]], rows: slice) -> dict[str, Tensor]:
    """Cache tensors under the names of the networks' inputs, rows ``rows`` of the first axis."""
    inputs = {}
    for layer, cache in enumerate(caches):
        inputs[f"k_cache.{layer}"] = cache.k[rows]
        inputs[f"v_cache.{layer}"] = cache.v[rows]
    return inputs


def _rotary_inputs(config: TargetConfig | DrafterConfig, positions: int, device: torch.device) -> dict[str, Tensor]:
    cos, sin = cos_sin_table(config.rope, positions).chunk(2, dim=-1)
    return {"rotary_cos": cos.contiguous().to(device), "rotary_sin": sin.contiguous().to(device)}

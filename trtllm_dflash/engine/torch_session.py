"""The torch backend: the networks run on a CPU or a CUDA GPU without TensorRT, there on the kernels of ``plugins/``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Literal

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, TargetInputs, TargetOutputs
from trtllm_dflash.engine.torch_weights import TorchWeightSource
from trtllm_dflash.errors import EngineError
from trtllm_dflash.model.dflash import draft_network, inject_network
from trtllm_dflash.model.rope import cos_sin_table
from trtllm_dflash.model.target import target_network
from trtllm_dflash.model.weights import drafter_weights, target_weights
from trtllm_dflash.ops.cuda_dialect import CudaOps, why_not_kernels
from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.ops.torch_dialect import TorchOps

logger = logging.getLogger(__name__)

KernelChoice = Literal["auto", "plugins", "torch"]


class TorchSession:
    """``EngineSession`` of the torch dialect.

    Args:
        target_config, drafter_config: what runs; without a drafter nothing is captured, injected or drafted.
        limits: the engine's limits (tables are made for ``max_seq_len``).
        target, drafter: weights.
        device: ``cpu`` or ``cuda:N``.
        dtype: compute dtype, and the caches' unless said otherwise.
        kernels: ``auto`` uses the plugin library's kernels where they fit, ``plugins`` insists, ``torch`` does without.
        target_cache_dtype: float8_e4m3fn for a target cache of half the size; needs the plugin kernels.

    Attributes:
        uses_kernels: whether the plugin library's kernels compute.

    Raises:
        EngineError: the kernels are insisted on, or needed, and cannot run here.
    """

    def __init__(
        self,
        target_config: TargetConfig,
        drafter_config: DrafterConfig | None,
        limits: BuildLimits,
        *,
        target: TorchWeightSource,
        drafter: TorchWeightSource | None,
        device: torch.device,
        dtype: torch.dtype,
        kernels: KernelChoice = "auto",
        target_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.target_config = target_config
        self.drafter_config = drafter_config
        self.limits = limits
        self.device = device
        self.dtype = dtype
        obstacle: str | None = "kernels were switched off"
        if kernels != "torch":
            obstacle = why_not_kernels(
                target_config, drafter_config, page_tokens=limits.page_tokens, device=device, dtype=dtype
            )
        self.uses_kernels = obstacle is None
        if obstacle is not None and (kernels == "plugins" or target_cache_dtype is not None):
            wanted = "the plugin kernels" if kernels == "plugins" else f"a target cache of {target_cache_dtype}"
            raise EngineError(f"{wanted} cannot be used: {obstacle}", hint="trtllm-dflash doctor says what is missing")
        if obstacle is not None and device.type == "cuda" and kernels == "auto":
            logger.warning("running without the CUDA kernels, which is slower: %s", obstacle)
        self.target_cache_dtype = target_cache_dtype or dtype
        self._ops = CudaOps() if self.uses_kernels else TorchOps()
        # A block may reach S rows past the last position before its padding is cut.
        positions = limits.max_seq_len + limits.block_size
        with torch.inference_mode():
            self._target = target_weights(target_config, target)
            self._target_rope = cos_sin_table(target_config.rope, positions).to(device)
            self._drafter, self._drafter_rope = None, None
            if drafter_config is not None and drafter is not None:
                self._drafter = drafter_weights(drafter_config, drafter)
                self._drafter_rope = cos_sin_table(drafter_config.rope, positions).to(device)
        if device.type == "cuda":
            # Pieces that were stacked into one matrix are free now, and the memory plan counts on it.
            torch.cuda.empty_cache()
        self._target_caches: Sequence[CacheLayer[Tensor]] = ()
        self._drafter_caches: Sequence[CacheLayer[Tensor]] = ()

    def cache_bytes_per_page(self) -> int:
        """Bytes of one page over both caches and all layers."""
        config, drafter = self.target_config, self.drafter_config
        size = config.num_layers * config.num_kv_heads * config.head_dim * self.target_cache_dtype.itemsize
        if drafter is not None:
            size += drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * self.dtype.itemsize
        return 2 * size * self.limits.page_tokens

    def weight_bytes(self) -> int:
        """Bytes of all weights and tables on the device; what is shared counts once."""
        sizes = {}
        for tensor in self._tensors():
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            else:
                sizes[id(tensor)] = tensor.numel() * tensor.dtype.itemsize
        return sum(sizes.values())

    def _tensors(self) -> Iterator[Tensor]:
        pending: list[object] = [self._target, self._drafter, self._target_rope, self._drafter_rope]
        while pending:
            item = pending.pop()
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, tuple | list):
                pending.extend(item)
            elif is_dataclass(item) and not isinstance(item, type):
                pending.extend(getattr(item, field.name) for field in fields(item))

    def allocate_caches(self, num_pages: int) -> None:
        """Allocate both paged caches, zeroed: what is masked must not be NaN."""

        def layers(count: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[CacheLayer[Tensor]]:
            shape = (num_pages + 1, self.limits.page_tokens, kv_heads, head_dim)

            def zeros() -> Tensor:
                return torch.zeros(shape, dtype=dtype, device=self.device)

            return [CacheLayer(zeros(), zeros()) for _ in range(count)]

        config, drafter = self.target_config, self.drafter_config
        self._target_caches = layers(config.num_layers, config.num_kv_heads, config.head_dim, self.target_cache_dtype)
        if drafter is not None:
            self._drafter_caches = layers(drafter.num_layers, drafter.num_kv_heads, drafter.head_dim, self.dtype)

    @property
    def target_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The target's cache layers (for tests and for prefix reuse)."""
        return self._target_caches

    @property
    def drafter_caches(self) -> Sequence[CacheLayer[Tensor]]:
        """The drafter's cache layers."""
        return self._drafter_caches

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero ``pages`` in both caches: after a fault their values may not be numbers, and masks do not hide NaN."""
        if not pages:
            return
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            for cache in (*self._target_caches, *self._drafter_caches):
                for rows in (cache.k, cache.v):
                    # float8 has no fill; zero is the same bits in every dtype.
                    rows.view(torch.uint8).index_fill_(0, index, 0)

    @torch.inference_mode()
    def target(self, inputs: TargetInputs) -> TargetOutputs:
        logits, features = target_network(
            self._ops,
            self.target_config,
            self._target,
            self._target_caches,
            cos_sin=self._target_rope,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            page_table=inputs.page_table,
            context_lengths=inputs.context_lengths,
            query_starts=inputs.query_starts,
            logit_rows=inputs.logit_rows,
            max_query=inputs.max_query,
            queries_per_request=inputs.queries_per_request,
            total_queries=inputs.input_ids.shape[0],
            capture_layers=() if self.drafter_config is None else self.drafter_config.target_layer_ids,
        )
        if features is None:
            features = logits.new_empty(inputs.input_ids.shape[0], 0)
        return TargetOutputs(logits, features)

    @torch.inference_mode()
    def inject(
        self, features: Tensor, positions: Tensor, slots: Tensor, *, queries_per_request: int | None = None
    ) -> None:
        if self.drafter_config is None or self._drafter is None or self._drafter_rope is None:
            raise EngineError("inject was called on an engine without a drafter")
        inject_network(
            self._ops,
            self.drafter_config,
            self._drafter,
            self._drafter_caches,
            cos_sin=self._drafter_rope,
            features=features,
            positions=positions,
            slots=slots,
        )

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, block_size: int) -> DraftOutputs:
        if self.drafter_config is None or self._drafter is None or self._drafter_rope is None:
            raise EngineError("draft was called on an engine without a drafter")
        tokens, candidates, q_rows = draft_network(
            self._ops,
            self.drafter_config,
            self._drafter,
            self._drafter_caches,
            embedding=self._target.embedding,
            head=self._target.head,
            cos_sin=self._drafter_rope,
            anchors=inputs.anchors,
            context_lengths=inputs.context_lengths,
            block_lengths=inputs.block_lengths,
            page_table=inputs.page_table,
            temperatures=inputs.temperatures,
            uniforms=inputs.uniforms,
            block_size=block_size,
        )
        return DraftOutputs(tokens, candidates, q_rows)

    def close(self) -> None:
        """Release caches."""
        self._target_caches = ()
        self._drafter_caches = ()

"""What a build would make and what it takes: plans, host memory, and the memory of the GPU that will run it.

Sizes of weights, caches and logits are exact. Plan sizes and the builder's memory are estimates from builds that
``python -m benchmarks.tensorrt`` repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.read import Checkpoint, open_checkpoint
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.build import Backend, build_limits, choose_backend, plan_options
from trtllm_dflash.engine.plan_build import PLAN_FILES
from trtllm_dflash.engine.plan_facts import Lowering, Network, WeightsMode
from trtllm_dflash.engine.plan_lowering import check_plan_options, choose_lowering
from trtllm_dflash.engine.rank_file import RankFile
from trtllm_dflash.engine.tensorrt_emission import heads_of_rank, linear_row_tokens, prefill_queries, row_buckets

# Builds of 3 to 52 layers with TensorRT-RTX 1.7: fixed part, and what one layer of one profile adds.
_PLAN_MB, _PLAN_MB_PER_LAYER, _SELECTOR_MB = 3.0, 0.65, 10.0
_HOST_MB, _HOST_MB_PER_LAYER = 405.0, 6.0
_EMBEDDED_HOST_FACTOR = 2.2
_MB = 1e6


@dataclass(frozen=True)
class PlanEstimate:
    """One network: plan file, weights it reads, estimated size of the plan, its profiles."""

    network: Network
    file: str
    weight_mb: float
    plan_mb: float
    profiles: tuple[str, ...]


@dataclass(frozen=True)
class BuildEstimate:
    """What ``build --dry-run`` says. Memory is of one rank, in MB (10^6 bytes).

    Attributes:
        backend, lowering, target_sm, weights, limits: what would be built. plans, lowering: none for torch.
        plugin_library: the file that the plugin lowering would use, or None.
        host_peak_mb: of the build. weights_mb: on the GPU, embedding and head once.
        target_cache_mb, drafter_cache_mb: of one running request of max_seq_len.
        logits_mb: logits of a verify pass, and their copy. activations_mb: the largest pass, roughly.
        gpu_memory_mb: given, or None. requests_that_fit: of max_seq_len in it, or None.
    """

    backend: Backend
    lowering: Lowering | None
    plugin_library: str | None
    target_sm: tuple[int, ...]
    weights: WeightsMode
    limits: BuildLimits
    plans: tuple[PlanEstimate, ...]
    host_peak_mb: float
    weights_mb: float
    target_cache_mb: float
    drafter_cache_mb: float
    logits_mb: float
    activations_mb: float
    gpu_memory_mb: float | None
    requests_that_fit: int | None

    def lines(self) -> list[str]:
        """The estimate as text."""
        sms = f", SM {', '.join(map(str, self.target_sm))}" if self.target_sm else ""
        cache = self.target_cache_mb + self.drafter_cache_mb
        lowering = "" if self.lowering is None else f", lowering {self.lowering}"
        out = [f"backend {self.backend}{sms}{lowering}, weights {self.weights}, nothing is written"]
        if self.plugin_library is not None:
            out.append(f"  plugin library: {self.plugin_library}")
        for plan in self.plans:
            out.append(
                f"  {plan.file}: about {plan.plan_mb:.0f} MB, reads {plan.weight_mb:.0f} MB of weights, profiles: "
                + ", ".join(plan.profiles)
            )
        out += [
            f"  host memory of the build: about {self.host_peak_mb:.0f} MB",
            f"  GPU memory: weights {self.weights_mb:.0f} MB, logits {self.logits_mb:.0f} MB, activations about "
            f"{self.activations_mb:.0f} MB",
            f"  KV cache of one request of {self.limits.max_seq_len} tokens: target {self.target_cache_mb:.1f} MB, "
            f"drafter {self.drafter_cache_mb:.1f} MB",
            f"  KV cache of {self.limits.max_batch_size} requests: {cache * self.limits.max_batch_size:.0f} MB",
        ]
        if self.gpu_memory_mb is not None and self.requests_that_fit is not None:
            fits = "all" if self.requests_that_fit >= self.limits.max_batch_size else "not all"
            out.append(
                f"  {self.gpu_memory_mb / 1e3:.0f} GB of GPU memory hold {self.requests_that_fit} such requests: "
                f"{fits} of --max-batch-size {self.limits.max_batch_size}"
            )
        return out


def estimate_build(
    checkpoint: str | Path,
    *,
    backend: str = "auto",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_num_tokens: int | None = None,
    block_size: int | None = None,
    lowering: Lowering | None = None,
    weights: WeightsMode = "external",
    target_sm: Sequence[int] = (),
    plugin_library: Path | None = None,
    gpu_memory_bytes: int | None = None,
) -> BuildEstimate:
    """Estimate a build without doing it; arguments and errors as in :func:`trtllm_dflash.engine.build.build`."""
    chosen = choose_backend(backend)
    source = open_checkpoint(checkpoint)
    chosen_lowering = choose_lowering(chosen, lowering, plugin_library)
    check_plan_options(chosen, weights=weights, target_sm=target_sm, timing_cache=None)
    limits = build_limits(source, chosen_lowering, max_batch_size, max_seq_len, max_num_tokens, block_size)
    sms: tuple[int, ...] = ()
    plans: tuple[PlanEstimate, ...] = ()
    library = None
    target_mb, drafter_mb, shared_mb = _weights(source)
    if chosen_lowering is not None:
        options = plan_options(
            source,
            chosen,
            chosen_lowering,
            weights=weights,
            target_sm=target_sm,
            plugin_library=plugin_library,
            timing_cache=None,
        )
        sms, library = options.target_sm, options.plugin_library
        buckets = row_buckets(limits.max_batch_size + (1 if chosen_lowering == "native" else 0))
        plans = _plans(source, limits, buckets, weights, target_mb, drafter_mb, shared_mb)
    linear = chosen_lowering == "native"
    pages = -(-limits.max_seq_len // limits.page_tokens)
    tokens = linear_row_tokens(limits) if linear else pages * limits.page_tokens
    dtype = getattr(torch, source.target_config.dtype)
    ranks = source.mapping.tp_size
    cache_dtype = torch.float8_e4m3fn if source.quantization.kv_cache_dtype == "fp8" else dtype
    target_cache = _cache_mb(source.target_config, tokens, cache_dtype, ranks)
    drafter_cache = 0.0 if source.drafter_config is None else _cache_mb(source.drafter_config, tokens, dtype, ranks)
    resident = target_mb + drafter_mb
    if plans and weights == "embedded":
        resident = sum(plan.plan_mb for plan in plans)
    logits = 2 * (limits.max_batch_size + 1) * limits.block_size * source.target_config.vocab_size * 4 / _MB
    activations = _activations_mb(source.target_config, limits, dtype)
    fits = None
    if gpu_memory_bytes is not None:
        # The last row of a linear cache is scratch; of a paged cache it is one page, which is next to nothing.
        room = gpu_memory_bytes / _MB - resident - logits - activations
        fits = max(0, int(room // (target_cache + drafter_cache)) - (1 if linear else 0))
    return BuildEstimate(
        backend=chosen,
        lowering=chosen_lowering,
        plugin_library=None if library is None else str(library.path),
        target_sm=sms,
        weights=weights,
        limits=limits,
        plans=plans,
        host_peak_mb=_host_mb(source, plans, weights),
        weights_mb=resident,
        target_cache_mb=target_cache,
        drafter_cache_mb=drafter_cache,
        logits_mb=logits,
        activations_mb=activations,
        gpu_memory_mb=None if gpu_memory_bytes is None else gpu_memory_bytes / _MB,
        requests_that_fit=fits,
    )


def _weights(source: Checkpoint) -> tuple[float, float, float]:
    """MB of one rank's target, drafter, and of the target's embedding and head (which the draft network reads too)."""

    def size(file: RankFile, names: Sequence[str]) -> float:
        return sum(file[name].nbytes for name in names) / _MB

    target = RankFile(source.path / "target" / "rank0.safetensors", shapes_only=True)
    shared = [name for name in ("transformer.vocab_embedding.weight", "lm_head.weight") if name in target]
    drafter_mb = 0.0
    if source.drafter_config is not None:
        drafter = RankFile(source.path / "drafter" / "rank0.safetensors", shapes_only=True)
        drafter_mb = size(drafter, list(drafter))
    return size(target, list(target)), drafter_mb, size(target, shared)


def _plans(
    source: Checkpoint,
    limits: BuildLimits,
    buckets: Sequence[int],
    weights: WeightsMode,
    target_mb: float,
    drafter_mb: float,
    shared_mb: float,
) -> tuple[PlanEstimate, ...]:
    verify = tuple(f"verify up to {bucket} rows" for bucket in buckets)
    both = (f"prefill up to {prefill_queries(limits)} tokens", *verify)
    embedded = weights == "embedded"

    def plan(network: Network, layers: int, weight_mb: float, profiles: tuple[str, ...], extra: float) -> PlanEstimate:
        size = _PLAN_MB + _PLAN_MB_PER_LAYER * layers * len(profiles) + extra + (weight_mb if embedded else 0.0)
        return PlanEstimate(network, PLAN_FILES[network].format(rank=0), weight_mb, size, profiles)

    out = [plan("target", source.target_config.num_layers, target_mb, both, 0.0)]
    if source.drafter_config is not None:
        config = source.drafter_config
        kv_share = config.num_layers * 2 * config.num_kv_heads * config.head_dim * config.hidden_size
        fc = len(config.target_layer_ids) * config.target_hidden_size * config.hidden_size
        inject_mb = (kv_share + fc) * getattr(torch, config.dtype).itemsize / _MB
        # One layer of injection is two cache updates, a tenth of a decoder layer.
        out.append(plan("inject", max(1, config.num_layers // 10), inject_mb, both, 0.0))
        selector = _SELECTOR_MB if config.selector is not None else 0.0
        out.append(plan("draft", config.num_layers, drafter_mb + shared_mb, verify, selector))
    return tuple(out)


def _host_mb(source: Checkpoint, plans: tuple[PlanEstimate, ...], weights: WeightsMode) -> float:
    if not plans:
        return _HOST_MB
    profiles = len(plans[0].profiles)
    largest = _EMBEDDED_HOST_FACTOR * max(plan.weight_mb for plan in plans) if weights == "embedded" else 0.0
    return _HOST_MB + _HOST_MB_PER_LAYER * source.target_config.num_layers * profiles + largest


def _cache_mb(config: TargetConfig | DrafterConfig, tokens: int, dtype: torch.dtype, ranks: int) -> float:
    heads = heads_of_rank(config.num_kv_heads, ranks)
    return 2 * config.num_layers * heads * config.head_dim * tokens * dtype.itemsize / _MB


def _activations_mb(config: TargetConfig, limits: BuildLimits, dtype: torch.dtype) -> float:
    """The widest moment of a decoder layer: residual, normed input, gate and up with their product."""
    tokens = max(prefill_queries(limits), (limits.max_batch_size + 1) * limits.block_size)
    return tokens * (3 * config.intermediate_size + 3 * config.hidden_size) * dtype.itemsize / _MB

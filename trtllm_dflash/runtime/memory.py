"""The memory plan: what is taken, and how many KV cache pages that leaves. Printed and obeyed."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import ConfigError, EngineError
from trtllm_dflash.runtime.prefill_pass import PassSizes
from trtllm_dflash.runtime.slots import SlotState

_CPU_SHARE, _GPU_SHARE = 0.5, 0.9
_MIB = 2**20
# A CPU decodes too slowly to fill more than this; zeroing more only delays the start.
_CPU_CACHE_BYTES = 2048 * _MIB
# Measured on an H200: a graph node of these cycles, and what cuBLAS and the allocator keep.
_GRAPH_NODE_BYTES = 2048
_NODES_PER_LAYER, _NODES_BESIDES = 12, 120
_LIBRARY_BYTES = 160 * _MIB


@dataclass(frozen=True)
class CachePlan:
    """Pages of the KV caches, and the bytes of everything that is taken.

    Attributes:
        num_pages, page_tokens: of both caches. cache_bytes: both caches, every layer.
        full_requests: requests of max_seq_len that the pages hold together.
        weight_bytes: weights and tables; what target and drafter share counts once.
        state_bytes: what is kept per slot. pass_bytes: activations and logits of the largest passes.
        graph_bytes: recorded CUDA graphs and what libraries keep on the device.
    """

    num_pages: int
    page_tokens: int
    cache_bytes: int
    full_requests: int
    weight_bytes: int = 0
    state_bytes: int = 0
    pass_bytes: int = 0
    graph_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_tokens

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.cache_bytes + self.weight_bytes + self.state_bytes + self.pass_bytes + self.graph_bytes

    def describe(self) -> str:
        """The plan on one line."""
        parts = (
            ("weights", self.weight_bytes),
            (f"KV caches of {self.tokens} tokens ({self.full_requests} whole sequences)", self.cache_bytes),
            ("slots", self.state_bytes),
            ("largest passes", self.pass_bytes),
            ("graphs and libraries", self.graph_bytes),
        )
        listed = ", ".join(f"{name} {size / _MIB:.0f}" for name, size in parts if size)
        return f"{self.total_bytes / _MIB:.0f} MiB: {listed}"


def plan_memory(session: EngineSession, kv_cache_tokens: int | None, *, block_size: int, graphs: int) -> CachePlan:
    """Pages for ``kv_cache_tokens``, or for the engine's limits as far as free memory allows; and the rest of the plan.

    Args:
        block_size: the largest S that will run. graphs: CUDA graphs that will be recorded.

    Raises:
        ConfigError: ``kv_cache_tokens`` is less than a page or more than the free memory alone could hold.
        EngineError: not even one request of max_seq_len fits.
    """
    limits = session.limits
    page_tokens, page_bytes = limits.page_tokens, session.cache_bytes_per_page()
    per_request = -(-limits.max_seq_len // page_tokens)
    state, passes = _state_bytes(session, limits), _pass_bytes(session, limits, block_size, graphs)
    graph_bytes = _graph_bytes(session, graphs)
    if kv_cache_tokens is not None:
        if kv_cache_tokens < page_tokens:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, expected at least one page of {page_tokens} tokens"
            )
        pages = kv_cache_tokens // page_tokens
        # Whoever gives a number may take all there is: the margins of our own choice do not apply.
        free_bytes = _free_bytes(session.device)
        if (pages + 1) * page_bytes > free_bytes:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, which take {(pages + 1) * page_bytes / _MIB:.0f} MiB; "
                f"{free_bytes / _MIB:.0f} MiB are free",
                hint=f"at most {max(0, free_bytes // page_bytes - 1) * page_tokens} tokens, less what else is needed",
            )
    else:
        usable = _usable_bytes(session.device)
        # One page more is taken for rows that are dropped.
        affordable = max(0, (usable - state - passes - graph_bytes) // page_bytes - 1)
        wanted = limits.max_batch_size * per_request
        if session.device.type != "cuda":
            wanted = min(wanted, max(per_request, _CPU_CACHE_BYTES // page_bytes))
        pages = min(wanted, affordable)
        if pages < per_request:

            def excess(max_batch_size: int) -> int:
                less = replace(limits, max_batch_size=max_batch_size)
                taken = _state_bytes(session, less) + _pass_bytes(session, less, block_size, graphs) + graph_bytes
                return taken + (per_request + 1) * page_bytes - usable

            batch = bisect_left(range(1, limits.max_batch_size + 1), 1, key=excess)
            smaller = f"--max-batch-size {batch}" if batch else "a smaller --max-seq-len or --max-num-tokens"
            raise EngineError(
                f"{affordable} KV cache pages fit in free memory, one request of max_seq_len {limits.max_seq_len} "
                f"needs {per_request} ({per_request * page_bytes / _MIB:.0f} MiB): of {usable / _MIB:.0f} MiB that may "
                f"be taken, slots need {state / _MIB:.0f} MiB, the largest passes {passes / _MIB:.0f} MiB and graphs "
                f"{graph_bytes / _MIB:.0f} MiB",
                hint=f"free memory, or build with {smaller}",
            )
    return CachePlan(
        num_pages=pages,
        page_tokens=page_tokens,
        cache_bytes=(pages + 1) * page_bytes,
        full_requests=pages // per_request,
        weight_bytes=session.weight_bytes(),
        state_bytes=state,
        pass_bytes=passes,
        graph_bytes=graph_bytes,
    )


def _state_bytes(session: EngineSession, limits: BuildLimits) -> int:
    vocab_size = session.target_config.vocab_size
    return SlotState.of_limits(limits, vocab_size=vocab_size, scratch_page=0, device=torch.device("meta")).bytes


def _pass_bytes(session: EngineSession, limits: BuildLimits, block_size: int, graphs: int) -> int:
    """The larger of the largest prefill and the largest verification with its draft.

    On the kernels a prefill is padded. Recorded passes share memory that is kept for them alone, and a prefill's logits
    lie beside it.
    """
    target, drafter = session.target_config, session.drafter_config
    width = 2 if target.dtype != "float32" else 4
    captured = 0 if drafter is None else 2 * len(drafter.target_layer_ids) * target.hidden_size
    qkv = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    # Residual, norm, projections before and after attention, and the MLP's two widths live at one time.
    per_token = width * (3 * target.hidden_size + 2 * qkv + 3 * target.intermediate_size + captured)
    logits = target.vocab_size * (width + 4)
    rows = limits.max_batch_size * block_size
    verify = rows * (per_token + logits)
    if drafter is not None and block_size > 1:
        verify += rows * target.vocab_size * width
    if session.uses_kernels:
        largest = PassSizes(limits).largest
        kept = largest.requests * target.vocab_size * width if graphs else 0
        return max(verify, largest.tokens * per_token + largest.requests * logits) + kept
    prefill = limits.max_num_tokens * per_token + min(limits.max_batch_size, limits.max_num_tokens) * logits
    return max(verify, prefill)


def _graph_bytes(session: EngineSession, graphs: int) -> int:
    if session.device.type != "cuda":
        return 0
    layers = session.target_config.num_layers
    if session.drafter_config is not None:
        layers += session.drafter_config.num_layers
    return graphs * (_NODES_PER_LAYER * layers + _NODES_BESIDES) * _GRAPH_NODE_BYTES + _LIBRARY_BYTES


def _usable_bytes(device: torch.device) -> int:
    return int(_free_bytes(device) * (_GPU_SHARE if device.type == "cuda" else _CPU_SHARE))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_host_bytes()


def _available_host_bytes() -> int:
    """Memory that can be taken without swapping: the page cache counts as free, other processes' memory does not."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            available = min(available, int(limit) - int(used) + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError, KeyError, IndexError):
        # Another system or another layout of cgroups: what is known so far has to do.
        pass
    return max(available, 0)

"""The memory plan: what is taken, and how many KV cache pages that leaves. Printed and obeyed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError

_CPU_SHARE, _GPU_SHARE = 0.5, 0.9


@dataclass(frozen=True)
class CachePlan:
    """Pages of the KV caches and their bytes (both caches, every layer)."""

    num_pages: int
    page_tokens: int
    cache_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_tokens


def plan_cache_pages(session: EngineSession, kv_cache_tokens: int | None) -> CachePlan:
    """Pages for ``kv_cache_tokens``, or for the engine's limits as far as free memory allows.

    Raises:
        EngineError: not even one request of max_seq_len fits.
    """
    limits = session.limits
    page_tokens, page_bytes = limits.page_tokens, session.cache_bytes_per_page()
    per_request = -(-limits.max_seq_len // page_tokens)
    if kv_cache_tokens is not None:
        if kv_cache_tokens < page_tokens:
            raise EngineError(
                f"kv_cache_tokens is {kv_cache_tokens}, expected at least one page of {page_tokens} tokens"
            )
        pages = kv_cache_tokens // page_tokens
    else:
        affordable = _usable_bytes(session.device) // page_bytes
        pages = min(limits.max_batch_size * per_request, affordable)
        if pages < per_request:
            raise EngineError(
                f"{affordable} KV cache pages fit in free memory, one request of max_seq_len {limits.max_seq_len} "
                f"needs {per_request} ({per_request * page_bytes / 2**20:.0f} MiB)",
                hint="free memory, or build with a smaller --max-seq-len",
            )
    return CachePlan(pages, page_tokens, pages * page_bytes)


def _usable_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * _CPU_SHARE)

"""What the runtime knows of an engine: three networks on named tensors, and two paged caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig


@dataclass(frozen=True)
class TargetInputs:
    """Inputs of the ``target`` network. T packed tokens of B requests, R rows whose logits are wanted.

    Attributes:
        input_ids, positions: ``[T]`` int64. slots: ``[T]`` int64 flat cache rows, -1 drops the row's K/V. With a
            session that uses the kernels, tokens behind the last query start are padding: their outputs mean nothing.
        page_table: ``[B, P]`` int64. context_lengths: ``[B]`` int64, positions cached before this pass.
        query_starts: ``[B + 1]`` int64. logit_rows: ``[R]`` int64 rows of the packed tokens, or None for all rows.
        max_query: host-known bound of tokens per request.
        queries_per_request: set when every request has exactly this many tokens, else None.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    logit_rows: Tensor | None
    max_query: int
    queries_per_request: int | None = None


@dataclass(frozen=True)
class TargetOutputs:
    """``logits [R, V]`` (float32, or the compute dtype with the plugin kernels) and ``features [T, F * H]`` (empty
    columns when the engine has no drafter)."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of the ``draft`` network.

    Attributes:
        anchors, context_lengths, block_lengths: ``[B]`` int64; block_lengths <= S rows of the block exist.
        page_table: ``[B, P]`` int64.
        temperatures: ``[B]`` float32, 0 = greedy. uniforms: ``[B, S-1]`` float32 in [0, 1).
    """

    anchors: Tensor
    context_lengths: Tensor
    block_lengths: Tensor
    page_table: Tensor
    temperatures: Tensor
    uniforms: Tensor


@dataclass(frozen=True)
class DraftOutputs:
    """``draft_tokens [B, S-1]`` int64, ``candidates [B, S-1, K]`` int64, ``q_rows [B, S-1, K]`` float32."""

    draft_tokens: Tensor
    candidates: Tensor
    q_rows: Tensor


class EngineSession(Protocol):
    """Runs the networks of one engine directory on one device.

    ``uses_kernels``: the plugin library's kernels can be used on the session's tensors, and its passes be recorded in a
    CUDA graph.
    """

    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    limits: BuildLimits
    device: torch.device
    uses_kernels: bool

    def allocate_caches(self, num_pages: int) -> None:
        """Allocate both paged caches with ``num_pages`` pages (and one scratch page each)."""

    def cache_bytes_per_page(self) -> int:
        """Bytes of one page over both caches and all layers."""

    def weight_bytes(self) -> int:
        """Bytes of all weights on the device; what is shared counts once."""

    def target(self, inputs: TargetInputs) -> TargetOutputs:
        """Run the target; writes the target cache at ``slots``."""

    def inject(
        self, features: Tensor, positions: Tensor, slots: Tensor, *, queries_per_request: int | None = None
    ) -> None:
        """Write the drafter cache from ``features [N, F*H]`` at ``positions [N]``, ``slots [N]`` (-1 drops a row).

        ``queries_per_request`` is set when every request has exactly this many consecutive rows, of which only the
        last may be dropped. Otherwise no row is dropped, but for the padding of a session that uses the kernels.
        """

    def draft(self, inputs: DraftInputs, block_size: int) -> DraftOutputs:
        """Propose ``block_size - 1`` tokens per request; reads the drafter cache, never writes it."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero ``pages`` in both caches (after a fault: masks do not hide NaN)."""

    def close(self) -> None:
        """Release device memory."""

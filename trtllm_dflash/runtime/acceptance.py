"""Acceptance: which drafts survive, and the token that follows them. Tensor code without host reads.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): draft x is kept with probability min(1, p(x) / q(x));
the first rejected position draws from the residual [p - q]+, so every emitted token has the target's distribution p.
q is the distribution that the walk realised; p is the target's after all sampling parameters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.engine.session import DraftOutputs
from trtllm_dflash.ops import cuda_select
from trtllm_dflash.ops.torch_select import top_k
from trtllm_dflash.runtime.random_streams import ACCEPT_WORD, RESIDUAL_WORD, uniforms
from trtllm_dflash.runtime.slots import SamplingMode, SlotRows


@dataclass(frozen=True)
class Accepted:
    """``tokens [B, S]`` (accepted drafts, then the correction or bonus token, then -1) and ``accepted [B]``.

    ``faulty [B]`` marks requests with a logit that is not a number.
    """

    tokens: Tensor
    accepted: Tensor
    faulty: Tensor


def target_probabilities(logits: Tensor, rows: SlotRows, mode: SamplingMode) -> Tensor:
    """Temperature, top-k, softmax, top-p, min-p of processed logits ``[B, S, V]`` → probabilities, float32.

    Top-p keeps the smallest set of most probable tokens whose mass reaches p; min-p keeps tokens of at least min_p
    times the best. Rows with temperature 0 are computed at temperature 1 and not used.
    """
    scalar = (-1, 1, 1)
    temperatures = torch.where(rows.temperatures > 0, rows.temperatures, 1.0).view(scalar)
    scores = logits / temperatures
    if not mode.filtered:
        return torch.softmax(scores, dim=-1)
    vocab_size = logits.shape[-1]
    bound = vocab_size if mode.top_k_bound is None else min(mode.top_k_bound, vocab_size)
    ordered, order = top_k(scores, bound)
    ranks = torch.arange(bound, device=logits.device)
    kept_ranks = torch.where(rows.top_k > 0, rows.top_k, vocab_size).view(scalar)
    probabilities = torch.softmax(ordered.masked_fill(ranks >= kept_ranks, float("-inf")), dim=-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    top_p = rows.top_p.view(scalar)
    # Rounding in the running sum must not cut anything when top-p is off.
    kept = (mass_before < top_p) | (top_p >= 1)
    kept &= probabilities >= rows.min_p.view(scalar) * probabilities[..., :1]
    # The best token always survives, whatever the parameters.
    kept |= ranks == 0
    probabilities = probabilities * kept
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, order, probabilities)


def accept(
    rows: SlotRows, mode: SamplingMode, logits: Tensor, draft: DraftOutputs | None, block_lengths: Tensor
) -> Accepted:
    """Verify the drafts of every request.

    Args:
        logits: processed logits ``[B, S, V]``; row j verifies draft j + 1.
        draft: the proposals, or None when S = 1. block_lengths: ``[B]``, rows of the block that exist, 0 = ended.
    """
    logits = logits.float()
    batch, block_size, _ = logits.shape
    best_logits, greedy_tokens = logits.max(-1)
    offsets = torch.arange(block_size, device=logits.device)
    drafts = logits.new_empty(batch, 0, dtype=torch.int64) if draft is None else draft.draft_tokens
    kept = drafts == greedy_tokens[:, :-1]
    final = greedy_tokens
    if mode.sampled:
        probabilities = target_probabilities(logits, rows, mode)
        draws = uniforms(rows.seeds, rows.context_lengths[:, None] + 1 + offsets)
        is_sampled = (rows.temperatures > 0)[:, None]
        if draft is not None:
            p = probabilities[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
            q = (draft.q_rows * (draft.candidates == drafts.unsqueeze(-1))).sum(-1)
            kept = torch.where(is_sampled, draws[:, :-1, ACCEPT_WORD] * q < p, kept)
    # Column j of `exists` is draft j + 1.
    exists = offsets[1:] < block_lengths[:, None]
    accepted = (kept & exists).to(torch.int64).cumprod(1).sum(1)
    at_final = accepted[:, None]
    final = greedy_tokens.gather(1, at_final)
    if mode.sampled:
        row = _take(probabilities, accepted)
        if draft is not None:
            rejected = accepted + 1 < block_lengths
            row = _residual(row, draft, accepted, rejected & (rows.temperatures > 0))
        drawn = _inverse_cdf(row, draws[..., RESIDUAL_WORD].gather(1, at_final))
        final = torch.where(is_sampled, drawn, final)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    tokens = torch.where(offsets < at_final, padded, torch.where(offsets == at_final, final, -1))
    faulty = (best_logits.isnan() & (offsets < block_lengths[:, None])).any(1)
    return Accepted(tokens, accepted, faulty)


def accept_on_kernels(
    rows: SlotRows, mode: SamplingMode, logits: Tensor, draft: DraftOutputs | None, block_lengths: Tensor
) -> Accepted:
    """:func:`accept` by the plugin library's kernel: CUDA tensors, logits of any float dtype."""
    batch = logits.shape[0]
    if draft is None:
        tokens, candidates = rows.slots.new_empty(batch, 0), rows.slots.new_empty(batch, 0, 1)
        q_rows = rows.temperatures.new_empty(batch, 0, 1)
    else:
        tokens, candidates, q_rows = draft.draft_tokens, draft.candidates, draft.q_rows
    result = cuda_select.accept(
        logits,
        tokens,
        candidates,
        q_rows,
        rows.temperatures,
        rows.seeds,
        rows.context_lengths + 1,
        block_lengths=block_lengths,
        top_k=rows.top_k if mode.filtered else None,
        top_p=rows.top_p if mode.filtered else None,
        min_p=rows.min_p if mode.filtered else None,
    )
    return Accepted(result.tokens, result.accepted, result.faulty)


def force_acceptance(
    accepted: Accepted, rows: SlotRows, drafts: Tensor, block_lengths: Tensor, mean_committed: float
) -> Accepted:
    """Commit ``mean_committed`` tokens on average whatever was verified, to measure cycles whose models are not real.

    The whole part always, one more as often as the fraction says, by a hash of the request's progress. Few launches:
    a real acceptance has none of them. Tokens beyond those committed are undefined, as they are in a cycle's result.
    """
    table = _forced_counts(mean_committed - 1, rows.slots.device)
    count = table[torch.add(rows.generated, rows.slots, alpha=7919) & (_FORCED_COUNTS - 1)]
    count = torch.minimum(count, (block_lengths - 1).clamp_min_(0))
    return Accepted(torch.cat((drafts, rows.anchors[:, None]), dim=1), count, torch.zeros_like(accepted.faulty))


_FORCED_COUNTS = 1 << 14


@functools.cache
def _forced_counts(wanted: float, device: torch.device) -> Tensor:
    """Accepted drafts by hash of the progress, ``wanted`` on average."""
    phase = _hash(torch.arange(_FORCED_COUNTS)).double() / 2.0**32
    return ((phase < wanted % 1.0).to(torch.int64) + int(wanted)).to(device)


def _hash(values: Tensor) -> Tensor:
    """Mixes int64 values to 32 bits (the finaliser of MurmurHash3, Appleby 2011)."""
    mixed = values & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """``rows [B, n, C]`` at ``index [B]`` → ``[B, C]``."""
    return rows.gather(1, index.view(-1, 1, 1).expand(-1, 1, rows.shape[-1])).squeeze(1)


def _residual(row: Tensor, draft: DraftOutputs, accepted: Tensor, rejected: Tensor) -> Tensor:
    """``[p - q]+`` at the first rejected position (p where nothing was rejected or nothing is left)."""
    index = accepted.clamp_max(draft.draft_tokens.shape[1] - 1)
    q = _take(draft.q_rows, index) * rejected[:, None]
    left = row.scatter_add(1, _take(draft.candidates, index), -q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, row)


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """First index whose running sum exceeds ``draw * total``: ``weights [B, V]``, ``draws [B, 1]`` → ``[B, 1]``.

    The running sum is float64: in float32 tail tokens of a large vocabulary would be lost.
    """
    running = weights.double().cumsum(-1)
    index = torch.searchsorted(running, draws.double() * running[:, -1:], right=True)
    return index.clamp_max(weights.shape[-1] - 1)

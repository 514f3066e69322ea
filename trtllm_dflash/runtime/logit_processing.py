"""What sampling parameters do to the target's logits, for every row of a block at once.

Row j of a request predicts the token after the anchor and drafts 1..j, so everything that depends on previous tokens
(penalties, bad words, ``min_tokens``) sees those drafts. This is what keeps speculation exact under each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_dflash.runtime.slots import SamplingMode, SlotRows, SlotState


def process_logits(state: SlotState, rows: SlotRows, mode: SamplingMode, logits: Tensor, drafts: Tensor) -> Tensor:
    """Apply bad words, min_tokens, logit_bias and penalties, in this order.

    Args:
        logits: ``[B, S, V]``, not changed. drafts: ``[B, S-1]``.

    Returns:
        ``[B, S, V]`` float32, or ``logits`` itself when ``mode`` asks for nothing.
    """
    if not (mode.bad_words or mode.min_tokens or mode.bias or mode.penalties):
        return logits
    # A float32 copy, whatever the network gave.
    logits = logits.to(torch.float32, copy=True)
    if mode.bad_words:
        _ban_bad_words(state, rows, logits, drafts)
    if mode.min_tokens:
        _ban_early_stops(state, rows, logits)
    if mode.bias:
        shape = (-1, logits.shape[1], -1)
        ids = state.bias_ids[rows.slots].unsqueeze(1).expand(shape)
        logits.scatter_add_(-1, ids, state.bias_values[rows.slots].unsqueeze(1).expand(shape))
    if mode.penalties:
        logits = _penalise(state, rows, logits, drafts)
    return logits


def _penalise(state: SlotState, rows: SlotRows, logits: Tensor, drafts: Tensor) -> Tensor:
    """Repetition (prompt and output; divides positive, multiplies negative logits), presence and frequency (output)."""
    counts = torch.zeros_like(logits)
    if drafts.shape[1]:
        counts[:, 1:].scatter_(-1, drafts.unsqueeze(-1), 1.0)
        counts = counts.cumsum(1)
    counts += state.output_counts[rows.slots].unsqueeze(1)
    seen = (counts > 0) | state.prompt_seen[rows.slots].unsqueeze(1)
    repetition = state.repetition[rows.slots].view(-1, 1, 1)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - state.frequency[rows.slots].view(-1, 1, 1) * counts
    penalised: Tensor = logits - state.presence[rows.slots].view(-1, 1, 1) * (counts > 0)
    return penalised


def _ban_early_stops(state: SlotState, rows: SlotRows, logits: Tensor) -> None:
    """Stop ids are impossible in rows whose token would come before ``min_tokens``."""
    ahead = torch.arange(logits.shape[1], device=logits.device)
    early = rows.generated[:, None] + ahead < state.min_tokens[rows.slots][:, None]
    banned = early[:, :, None] & (rows.stop_ids >= 0)[:, None, :]
    _scatter_minus_inf(logits, rows.stop_ids.clamp_min(0), banned)


def _ban_bad_words(state: SlotState, rows: SlotRows, logits: Tensor, drafts: Tensor) -> None:
    """The last token of a bad word is impossible where the tokens before it are the word's prefix."""
    prefixes = state.bad_prefixes[rows.slots]
    width = prefixes.shape[-1]
    positions = rows.context_lengths[:, None] + torch.arange(1 - width, 1, device=logits.device)
    past = state.history[rows.slots].gather(1, positions.clamp_min(0))
    past = torch.where(positions < 0, -3, past)
    tails = torch.cat((past, drafts), dim=1).unfold(1, width, 1)
    same = (tails[:, :, None, :] == prefixes[:, None]) | (prefixes[:, None] == -1)
    _scatter_minus_inf(logits, state.bad_last[rows.slots], same.all(-1))


def _scatter_minus_inf(logits: Tensor, ids: Tensor, banned: Tensor) -> None:
    """``logits[b, s, ids[b, n]] = -inf`` where ``banned [B, S, n]``."""
    values = torch.zeros(banned.shape, dtype=logits.dtype, device=logits.device)
    values.masked_fill_(banned, float("-inf"))
    logits.scatter_add_(-1, ids.unsqueeze(1).expand(-1, logits.shape[1], -1), values)


def restrict(processed: Tensor, logits: Tensor, allowed: Tensor) -> Tensor:
    """Only tokens that a grammar allows, ``allowed [B, S, V]`` bool, are possible.

    Where the other parameters ban all of those, the grammar wins: the row takes the target's own logits of them.
    """
    banned = ~allowed
    restricted = processed.masked_fill(banned, float("-inf"))
    is_empty = restricted.amax(-1, keepdim=True) == float("-inf")
    return torch.where(is_empty, logits.masked_fill(banned, float("-inf")), restricted)

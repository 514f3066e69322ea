"""The draft-verify cycle, written once on tensors.

Static shapes for a (batch, block size), no host reads, no loop over requests: on a CPU it runs eagerly, on a GPU the
same function can be captured. State changes only in :func:`publish`, so a cycle that fails can be run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, EngineSession, TargetInputs, TargetOutputs
from trtllm_dflash.ops import cuda_cycle, cuda_select
from trtllm_dflash.runtime.acceptance import Accepted, accept, accept_on_kernels, force_acceptance
from trtllm_dflash.runtime.logit_processing import process_logits, restrict
from trtllm_dflash.runtime.random_streams import WALK_WORD, uniforms
from trtllm_dflash.runtime.slots import SamplingMode, SlotRows, SlotState

RUNNING, STOPPED, OUT_OF_LENGTH, FAULTY = 0, 1, 2, 3
"""Values of ``CycleResult.status``."""


Masks = Callable[[Tensor], Tensor]
"""Drafts ``[B, S-1]`` to the tokens allowed in each row, ``[B, S, V]`` bool. It reads the drafts on the host."""


@dataclass(frozen=True)
class CycleResult:
    """What a cycle emitted, on the device.

    Attributes:
        tokens: ``[B, S]``; the first ``produced`` of each row are new output, the rest is undefined.
        produced: ``[B]`` tokens emitted (committed, cut by stop ids and limits).
        accepted: ``[B]`` drafts kept before the cut. status: ``[B]``, see the constants above.
        packed: ``[B, S + 3]``, the four side by side, where a kernel made them so.
        logprobs: ``[B, S]`` of the emitted tokens, top_logprobs and top_ids ``[B, S, N]``; None unless asked for.
    """

    tokens: Tensor
    produced: Tensor
    accepted: Tensor
    status: Tensor
    packed: Tensor | None = None
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def draft_verify_cycle(
    session: EngineSession,
    state: SlotState,
    slots: Tensor,
    block_size: int,
    page_columns: int,
    mode: SamplingMode,
    *,
    forced_acceptance: float | None = None,
    masks: Masks | None = None,
) -> CycleResult:
    """One cycle for the running ``slots [B]``. ``block_size`` 1 is plain decoding in the same machinery.

    ``page_columns`` is a host-known bound of the pages any request of the batch touches. ``forced_acceptance`` is for
    measurements only: whatever the target says, that many tokens are committed on average (the bonus included), so the
    output is not the target's. ``masks`` is given when a request of the batch has a grammar (``mode.grammar``); it
    waits for the drafts, so such a cycle cannot be recorded.
    """
    rows = prepare(session, state, slots, block_size, page_columns)
    draft = draft_and_select(session, rows, block_size, mode)
    verified = verify(session, rows, draft, block_size)
    logits = verified.logits.view(slots.shape[0], block_size, -1)
    allowed = None if masks is None else masks(_drafts(rows, draft))
    result = settle(session, state, rows, mode, logits, draft, forced_acceptance=forced_acceptance, allowed=allowed)
    inject(session, rows, verified.features, result.produced, block_size)
    publish(session, state, rows, result, mode)
    return result


def prepare(session: EngineSession, state: SlotState, slots: Tensor, block_size: int, page_columns: int) -> SlotRows:
    """Gather the slots' rows and say how long each request's block is."""
    return state.gather(slots, page_columns, block_size, kernels=session.uses_kernels)


def draft_and_select(
    session: EngineSession, rows: SlotRows, block_size: int, mode: SamplingMode
) -> DraftOutputs | None:
    """Propose ``block_size - 1`` tokens per request."""
    if block_size == 1:
        return None
    shape = (rows.slots.shape[0], block_size - 1)
    if mode.sampled and session.uses_kernels:
        draws = cuda_select.uniforms(rows.seeds, rows.context_lengths + 1, block_size - 1, WALK_WORD)
    elif mode.sampled:
        positions = rows.context_lengths[:, None] + torch.arange(1, block_size, device=rows.slots.device)
        draws = uniforms(rows.seeds, positions)[..., WALK_WORD]
    else:
        draws = _no_draws(shape, rows.slots.device)
    inputs = DraftInputs(
        rows.anchors, rows.context_lengths, rows.block_lengths, rows.page_table, rows.temperatures, draws
    )
    return session.draft(inputs, block_size)


def verify(session: EngineSession, rows: SlotRows, draft: DraftOutputs | None, block_size: int) -> TargetOutputs:
    """One causal target pass over anchor and drafts; rows beyond a request's block write nowhere."""
    anchors = rows.anchors[:, None]
    ids = anchors if draft is None else torch.cat((anchors, draft.draft_tokens), dim=1)
    positions, slots = block_rows(session, rows, rows.block_lengths, block_size)
    return session.target(
        TargetInputs(
            input_ids=ids.reshape(-1),
            positions=positions,
            slots=slots,
            page_table=rows.page_table,
            context_lengths=rows.context_lengths,
            query_starts=_query_starts(ids.shape[0], block_size, ids.device),
            logit_rows=None,
            max_query=block_size,
            queries_per_request=block_size,
        )
    )


def settle(
    session: EngineSession,
    state: SlotState,
    rows: SlotRows,
    mode: SamplingMode,
    logits: Tensor,
    draft: DraftOutputs | None,
    *,
    forced_acceptance: float | None = None,
    allowed: Tensor | None = None,
) -> CycleResult:
    """Accept drafts and cut the result at stop ids and limits.

    ``logits [B, S, V]`` are the target's own; ``allowed [B, S, V]`` bool are the tokens a grammar allows.
    """
    drafts = _drafts(rows, draft)
    processed = process_logits(state, rows, mode, logits, drafts)
    if allowed is not None:
        processed = restrict(processed, logits, allowed)
    on_kernels = session.uses_kernels
    accepted = (accept_on_kernels if on_kernels else accept)(rows, mode, processed, draft, rows.block_lengths)
    if forced_acceptance is not None:
        accepted = force_acceptance(accepted, rows, drafts, rows.block_lengths, forced_acceptance)
    packed = None
    if on_kernels:
        produced, status, packed = cuda_cycle.cut(
            accepted.tokens, accepted.accepted, accepted.faulty, rows.remaining, rows.stop_ids
        )
    else:
        produced, status = _cut(rows, accepted)
    if mode.logprobs is None:
        return CycleResult(accepted.tokens, produced, accepted.accepted, status, packed)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, accepted.tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    top = logprobs.topk(mode.logprobs, dim=-1)
    return CycleResult(accepted.tokens, produced, accepted.accepted, status, packed, chosen, top.values, top.indices)


def inject(session: EngineSession, rows: SlotRows, features: Tensor, produced: Tensor, block_size: int) -> None:
    """Give the drafter the features of committed inputs: the anchor and the drafts kept, not the new token."""
    if session.drafter_config is None or features.shape[1] == 0:
        return
    positions, slots = block_rows(session, rows, produced, block_size)
    session.inject(features, positions, slots, queries_per_request=block_size)


def publish(session: EngineSession, state: SlotState, rows: SlotRows, result: CycleResult, mode: SamplingMode) -> None:
    """Move every slot forward by what was emitted; one that stopped has nothing left to emit."""
    slots, produced = rows.slots, result.produced
    if session.uses_kernels:
        state.advance(rows, result.tokens, produced, result.status)
    else:
        last = result.tokens.gather(1, (produced - 1).clamp_min(0)[:, None]).squeeze(1)
        anchors = torch.where(produced > 0, last, rows.anchors)
        remaining = torch.where(result.status == RUNNING, rows.remaining - produced, 0)
        contexts, generated = rows.context_lengths + produced, rows.generated + produced
        state.set_progress(slots, torch.stack((anchors, contexts, remaining, generated)))
    if mode.penalties or mode.bad_words:
        emitted = torch.arange(result.tokens.shape[1], device=slots.device) < produced[:, None]
        tokens = torch.where(emitted, result.tokens, 0)
        flat = slots[:, None] * state.output_counts.shape[1] + tokens
        counts = emitted.to(state.output_counts.dtype)
        state.output_counts.view(-1).scatter_add_(0, flat.view(-1), counts.view(-1))
        columns = rows.context_lengths[:, None] + 1 + torch.arange(tokens.shape[1], device=slots.device)
        state.history[slots[:, None], columns] = tokens


def block_rows(session: EngineSession, rows: SlotRows, lengths: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions ``[B * S]`` of the blocks' rows and their cache rows, -1 from row ``lengths [B]`` on."""
    if session.uses_kernels:
        page_tokens = session.limits.page_tokens
        return cuda_cycle.block_rows(rows.page_table, rows.context_lengths, lengths, block_size, page_tokens)
    offsets = torch.arange(block_size, device=lengths.device)
    positions = rows.context_lengths[:, None] + offsets
    slots = flat_slots(session, rows.page_table, positions, offsets < lengths[:, None])
    return positions.reshape(-1), slots.reshape(-1)


def flat_slots(session: EngineSession, page_table: Tensor, positions: Tensor, exists: Tensor) -> Tensor:
    """Cache rows of ``positions [B, n]`` (-1 where not ``exists``)."""
    page_tokens = session.limits.page_tokens
    columns = (positions // page_tokens).clamp_max(page_table.shape[1] - 1)
    slots = page_table.gather(1, columns) * page_tokens + positions % page_tokens
    return torch.where(exists, slots, -1)


# Made once: inside a recorded cycle each would be a launch of its own, every time. Recorded cycles read them where they
# are, so they are never forgotten.
@functools.cache
def _no_draws(shape: tuple[int, int], device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)


@functools.cache
def _query_starts(batch: int, block_size: int, device: torch.device) -> Tensor:
    return torch.arange(0, batch * block_size + 1, block_size, device=device)


def _drafts(rows: SlotRows, draft: DraftOutputs | None) -> Tensor:
    return rows.slots.new_empty(rows.slots.shape[0], 0) if draft is None else draft.draft_tokens


def _cut(rows: SlotRows, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Tokens emitted and status: cut after the first stop id and at the tokens still allowed."""
    committed = accepted.accepted + 1
    width = accepted.tokens.shape[1]
    offsets = torch.arange(width, device=committed.device)
    allowed = torch.minimum(committed, rows.remaining)
    is_stop = (accepted.tokens[:, :, None] == rows.stop_ids[:, None, :]).any(-1) & (offsets < allowed[:, None])
    first_stop = torch.where(is_stop, offsets, width).min(1).values
    stopped = first_stop < width
    produced = torch.where(stopped, first_stop + 1, allowed)
    status = torch.where(produced >= rows.remaining, OUT_OF_LENGTH, RUNNING)
    status = torch.where(stopped, STOPPED, status)
    produced = torch.where(accepted.faulty, 0, produced)
    return produced, torch.where(accepted.faulty, FAULTY, status)

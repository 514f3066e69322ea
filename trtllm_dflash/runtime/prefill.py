"""Prefill: prompts in chunks of a token budget; every chunk's features are injected in the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trtllm_dflash.engine.session import EngineSession, TargetInputs
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.cycle import CycleResult, Masks, flat_slots, prepare, publish, settle
from trtllm_dflash.runtime.request import Request
from trtllm_dflash.runtime.slots import SamplingMode, SlotState, upload


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``start .. start + count`` of what one request must compute before its next cycle.

    ``completes`` when a token is drawn after them: they end the prompt of a request that has no output yet. After a
    preemption the anchor was drawn long ago.
    """

    request: Request
    start: int
    count: int

    @property
    def slot(self) -> int:
        """The request's slot; an admitted request has one."""
        if self.request.slot is None:
            raise EngineError(f"request {self.request.spec.request_id} has no slot")
        return self.request.slot

    @property
    def completes(self) -> bool:
        return self.start + self.count == len(self.request.prefill_ids) and not self.request.emitted


def plan_chunks(waiting_prefill: Sequence[Request], token_budget: int) -> list[PrefillChunk]:
    """Chunks of admitted requests in order of arrival, together at most ``token_budget`` tokens."""
    chunks = []
    for request in waiting_prefill:
        if token_budget == 0:
            break
        count = min(len(request.prefill_ids) - request.prefilled, token_budget)
        chunks.append(PrefillChunk(request, request.prefilled, count))
        token_budget -= count
    return chunks


def run_prefill(
    session: EngineSession,
    state: SlotState,
    chunks: Sequence[PrefillChunk],
    masks_of: Callable[[Sequence[Request]], Masks | None] = lambda requests: None,
) -> tuple[list[Request], CycleResult | None]:
    """Compute the chunks; requests whose prompt is complete get their first token.

    ``masks_of`` gives the grammar masks of a batch, see ``draft_verify_cycle``.

    Returns:
        the completed requests and their one-token result, in the same order (None if there are none).
    """
    device = session.device
    page_tokens = session.limits.page_tokens
    columns = max((chunk.start + chunk.count + page_tokens - 1) // page_tokens for chunk in chunks)
    facts = [[chunk.slot, chunk.start, chunk.count] for chunk in chunks]
    slots, starts, counts = upload(facts, torch.int64, device).t().contiguous()
    ends = counts.cumsum(0)
    total = sum(chunk.count for chunk in chunks)
    owner = torch.repeat_interleave(torch.arange(len(chunks), device=device), counts, output_size=total)
    positions = torch.arange(total, device=device) - (ends - counts - starts)[owner]
    page_table = state.page_table[slots, :columns]
    cache_slots = flat_slots(
        session, page_table[owner], positions[:, None], torch.ones_like(owner, dtype=torch.bool)[:, None]
    )
    cache_slots = cache_slots.view(-1)
    ids: list[int] = []
    for chunk in chunks:
        ids.extend(chunk.request.prefill_ids[chunk.start : chunk.start + chunk.count])
    completing = [index for index, chunk in enumerate(chunks) if chunk.completes]
    outputs = session.target(
        TargetInputs(
            input_ids=upload(ids, torch.int64, device),
            positions=positions,
            slots=cache_slots,
            page_table=page_table,
            context_lengths=starts,
            query_starts=torch.nn.functional.pad(ends, (1, 0)),
            # One row at least: the head is never asked for an empty product.
            logit_rows=(ends - 1).index_select(0, upload(completing or [len(chunks) - 1], torch.int64, device)),
            max_query=max(chunk.count for chunk in chunks),
        )
    )
    if session.drafter_config is not None:
        session.inject(outputs.features, positions, cache_slots)
    if not completing:
        _advance(chunks)
        return [], None
    requests = [chunks[index].request for index in completing]
    mode = SamplingMode()
    for request in requests:
        mode |= request.spec.mode
    rows = prepare(session, state, slots.index_select(0, upload(completing, torch.int64, device)), 1, columns)
    masks = masks_of(requests)
    allowed = None if masks is None else masks(slots.new_empty(len(requests), 0))
    result = settle(session, state, rows, mode, outputs.logits.unsqueeze(1), None, allowed=allowed)
    publish(session, state, rows, result, mode)
    _advance(chunks)
    return requests, result


def _advance(chunks: Sequence[PrefillChunk]) -> None:
    """Only after everything succeeded, so that a failed pass can be run again."""
    for chunk in chunks:
        chunk.request.prefilled += chunk.count


@torch.inference_mode()
def run_largest_prefill(session: EngineSession, scratch_page: int) -> None:
    """Run the largest pass that prompts will ever need, over the scratch page, and leave that page zeroed.

    An engine without the memory for it must not start: it would take requests and fail the first long prompts.

    Raises:
        EngineError: there is not enough memory.
    """
    limits, device = session.limits, session.device
    requests = min(limits.max_batch_size, limits.max_num_tokens)
    count = min(limits.max_num_tokens // requests, limits.max_seq_len)
    positions = torch.arange(count, device=device).repeat(requests)
    slots = scratch_page * limits.page_tokens + positions % limits.page_tokens
    columns = -(-count // limits.page_tokens)
    starts = torch.arange(requests + 1, device=device) * count
    try:
        outputs = session.target(
            TargetInputs(
                input_ids=torch.zeros_like(positions),
                positions=positions,
                slots=slots,
                page_table=torch.full((requests, columns), scratch_page, device=device),
                context_lengths=torch.zeros(requests, dtype=torch.int64, device=device),
                query_starts=starts,
                logit_rows=starts[1:] - 1,
                max_query=count,
            )
        )
        if session.drafter_config is not None:
            session.inject(outputs.features, positions, slots)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"there is no memory left for a prefill of {requests * count} tokens, the most that one pass may take",
            hint="give the engine a smaller KV cache, or build with a smaller --max-num-tokens",
        ) from error
    session.clear_pages([scratch_page])

"""Prefill: prompts in chunks of a token budget; every chunk's features are injected in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.engine.cuda_graphs import CapturedGraph, GraphPool
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.cycle import CycleResult, Masks, prepare, publish, settle
from trtllm_dflash.runtime.prefill_pass import PassSize, PassSizes, pack, target_inputs
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


def plan_chunks(
    waiting_prefill: Sequence[Request], token_budget: int, max_requests: int | None = None
) -> list[PrefillChunk]:
    """Chunks of admitted requests in order of arrival, together at most ``token_budget`` tokens."""
    chunks: list[PrefillChunk] = []
    for request in waiting_prefill[:max_requests]:
        if token_budget == 0:
            break
        count = min(len(request.prefill_ids) - request.prefilled, token_budget)
        chunks.append(PrefillChunk(request, request.prefilled, count))
        token_budget -= count
    return chunks


class PrefillRunner:
    """Runs prefill passes over the slots of one :class:`SlotState`.

    Args:
        session, state: what runs, on what. pool: records passes as CUDA graphs, needs a session on the plugin kernels;
            None launches them one by one.

    Attributes:
        most_tokens, most_requests: of one pass; None = any number.
    """

    def __init__(self, session: EngineSession, state: SlotState, pool: GraphPool | None = None) -> None:
        self._session = session
        self._state = state
        self._pool = pool
        # Padded without graphs, too: what a prompt's logits are does not depend on how its pass is launched.
        self._sizes = PassSizes(session.limits) if session.uses_kernels else None
        self.most_tokens = self._sizes.largest.tokens if self._sizes else None
        self.most_requests = self._sizes.largest.requests if self._sizes else None
        self._packed: dict[PassSize, Tensor] = {}
        self._graphs: dict[PassSize, CapturedGraph[None]] = {}
        # Of every recorded pass: graphs of one pool may overwrite each other's results.
        self._logits: Tensor | None = None

    def warm_up(self) -> None:
        """Record passes of all sizes, so that no request waits for a recording and the largest one is known to fit.

        Raises:
            EngineError: there is not enough memory.
        """
        if self._pool is None or self._sizes is None:
            return
        for size in self._sizes.all():
            try:
                self._graph(size)
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"there is no memory left for a prefill of {size.tokens} tokens",
                    hint=f"give the engine a smaller KV cache, or build with a --max-num-tokens below {size.tokens}",
                ) from error
        # Each was run once on the recording stream, whose memory nobody else is given.
        torch.cuda.empty_cache()

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        masks_of: Callable[[Sequence[Request]], Masks | None] = lambda requests: None,
    ) -> tuple[list[Request], CycleResult | None]:
        """Compute the chunks; requests whose prompt is complete get their first token.

        Args:
            chunks: within :attr:`most_tokens` and :attr:`most_requests`.
            masks_of: gives the grammar masks of a batch, see ``draft_verify_cycle``.

        Returns:
            the completed requests and their one-token result, in the same order (None if there are none).
        """
        logits = self._compute(chunks)
        completing = [index for index, chunk in enumerate(chunks) if chunk.completes]
        requests = [chunks[index].request for index in completing]
        result = self._first_tokens(chunks, completing, logits, masks_of) if completing else None
        # Only after everything succeeded, so that a failed pass can be run again.
        for chunk in chunks:
            chunk.request.prefilled += chunk.count
        return requests, result

    def _compute(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Write both caches; logits of every chunk's last token, ``[len(chunks) or more, V]``."""
        ids: list[int] = []
        for chunk in chunks:
            ids.extend(chunk.request.prefill_ids[chunk.start : chunk.start + chunk.count])
        facts = [(chunk.slot, chunk.start, chunk.count) for chunk in chunks]
        size = PassSize(len(ids), len(chunks)) if self._sizes is None else self._sizes.holding(len(ids), len(chunks))
        packed = upload(pack(ids, facts, size, self._state.idle_slot), torch.int64, self._session.device)
        if self._pool is not None and self._sizes is not None:
            graph = self._graph(size)
            self._packed[size].copy_(packed)
            graph.replay()
            assert self._logits is not None
            return self._logits
        if self._sizes is not None:
            return self._pass(packed, size, *self._bounds(size))
        return self._pass(packed, size, self._columns(chunks), max(chunk.count for chunk in chunks))

    def _bounds(self, size: PassSize) -> tuple[int, int]:
        """Pages and tokens that a request of a padded pass can have."""
        return self._state.page_table.shape[1], size.tokens

    def _columns(self, chunks: Sequence[PrefillChunk]) -> int:
        page_tokens = self._session.limits.page_tokens
        return max(-(-(chunk.start + chunk.count) // page_tokens) for chunk in chunks)

    def _pass(self, packed: Tensor, size: PassSize, page_columns: int, max_query: int) -> Tensor:
        session = self._session
        inputs = target_inputs(session, self._state, packed, size, page_columns=page_columns, max_query=max_query)
        outputs = session.target(inputs)
        if session.drafter_config is not None:
            session.inject(outputs.features, inputs.positions, inputs.slots)
        return outputs.logits

    def _graph(self, size: PassSize) -> CapturedGraph[None]:
        """The graph of this size, recorded on first use."""
        if size not in self._graphs:
            assert self._pool is not None
            nothing = pack([], [(self._state.idle_slot, 0, 0)], size, self._state.idle_slot)
            packed = upload(nothing, torch.int64, self._session.device)
            self._packed[size] = packed
            self._graphs[size] = self._pool.capture(lambda: self._recorded(packed, size))
        return self._graphs[size]

    def _recorded(self, packed: Tensor, size: PassSize) -> None:
        logits = self._pass(packed, size, *self._bounds(size))
        if self._logits is None:
            # In the run before the first recording: this memory is not the pool's.
            rows = self.most_requests or size.requests
            self._logits = logits.new_empty(rows, logits.shape[1])
        self._logits[: size.requests].copy_(logits)

    def _first_tokens(
        self,
        chunks: Sequence[PrefillChunk],
        completing: Sequence[int],
        logits: Tensor,
        masks_of: Callable[[Sequence[Request]], Masks | None],
    ) -> CycleResult:
        session, state = self._session, self._state
        mode = SamplingMode()
        for index in completing:
            mode |= chunks[index].request.spec.mode
        slots = upload([chunks[index].slot for index in completing], torch.int64, session.device)
        if len(completing) < len(chunks):
            logits = logits.index_select(0, upload(completing, torch.int64, session.device))
        else:
            logits = logits[: len(chunks)]
        rows = prepare(session, state, slots, 1, self._columns(chunks))
        masks = masks_of([chunks[index].request for index in completing])
        allowed = None if masks is None else masks(slots.new_empty(len(completing), 0))
        result = settle(session, state, rows, mode, logits.unsqueeze(1), None, allowed=allowed)
        publish(session, state, rows, result, mode)
        return result

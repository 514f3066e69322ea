"""Running native TensorRT networks: linear caches behind the paged-cache interface.

A linear cache has one row per request. To the runtime it is a paged cache whose page is a whole sequence: page id and
cache row are the same number, the page table has one column, and the last row is the scratch page. So the runtime
needs no second code path; only this file knows.

A pass runs over every row of the caches, because TensorRT's cache update ties the batch of a network to its caches.
Rows whose request is not in the pass get placeholder tokens and write behind the longest sequence, where nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.network_session import NetworkRunner, NetworkSession, cache_inputs
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, TargetInputs, TargetOutputs
from trtllm_dflash.errors import EngineError

_EVERY_ROW = slice(None)


class LinearSession(NetworkSession):
    """``EngineSession`` over native networks; caches are ``[rows, kv_heads, row_tokens, head_dim]``.

    Args:
        target_config, drafter_config: what runs. limits: the engine's; ``page_tokens`` is a row's usable length.
        runner: computes the networks. device: of every tensor. dtype: of caches and features.
        row_tokens: positions of one cache row, at least ``page_tokens + block_size``.
        weight_bytes: what the runner's weights take on the device, for the memory plan.
    """

    def __init__(
        self,
        target_config: TargetConfig,
        drafter_config: DrafterConfig | None,
        limits: BuildLimits,
        *,
        runner: NetworkRunner,
        device: torch.device,
        dtype: torch.dtype,
        row_tokens: int,
        weight_bytes: int = 0,
    ) -> None:
        if limits.page_tokens < limits.max_seq_len or row_tokens < limits.page_tokens + limits.block_size:
            raise EngineError(
                f"rows of {row_tokens} tokens, {limits.page_tokens} of them usable, do not hold sequences of "
                f"{limits.max_seq_len} and blocks of {limits.block_size}",
                hint="build the engine again",
            )
        super().__init__(
            target_config,
            drafter_config,
            limits,
            runner=runner,
            device=device,
            dtype=dtype,
            positions=row_tokens,
            row_tokens=row_tokens,
            weight_bytes=weight_bytes,
        )
        self._rows = 0

    def _cache_shape(self, pages: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (pages, kv_heads, self._row_tokens, head_dim)

    def allocate_caches(self, num_pages: int) -> None:
        """See ``EngineSession``: ``num_pages`` rows and the scratch row."""
        self._rows = num_pages + 1
        super().allocate_caches(num_pages)

    @torch.inference_mode()
    def target(self, inputs: TargetInputs) -> TargetOutputs:
        if inputs.queries_per_request is None:
            return self._prefill(inputs)
        return self._verify(inputs, inputs.queries_per_request)

    def _verify(self, inputs: TargetInputs, queries: int) -> TargetOutputs:
        """Every request has ``queries`` tokens; every cache row runs."""
        if inputs.logit_rows is not None:
            raise EngineError("a verify pass gives the logits of every row; logit_rows must be None")
        rows = inputs.page_table[:, 0]
        offsets = torch.arange(queries, device=self.device, dtype=torch.int32).expand(self._rows, queries)
        placed = {
            "input_ids": self._by_row(rows, inputs.input_ids.view(-1, queries), 0),
            "positions": self._by_row(rows, inputs.positions.view(-1, queries), offsets),
            "write_starts": self._by_row(rows, inputs.context_lengths, self.limits.page_tokens),
            "key_lengths": self._by_row(rows, inputs.context_lengths + queries, queries),
            "logit_rows": offsets.contiguous(),
        }
        outputs = self._run_target(placed, _EVERY_ROW)
        logits = outputs["logits"].index_select(0, rows)
        features = self._features(outputs, rows.shape[0] * queries)
        if features.shape[1]:
            features = outputs["features"].index_select(0, rows).view(rows.shape[0] * queries, -1)
        return TargetOutputs(logits.view(-1, logits.shape[-1]), features)

    def _prefill(self, inputs: TargetInputs) -> TargetOutputs:
        """Requests of different lengths, one after the other, each on its own row."""
        starts = inputs.query_starts.tolist()
        wanted = list(range(starts[-1])) if inputs.logit_rows is None else inputs.logit_rows.tolist()
        rows, contexts = inputs.page_table[:, 0].tolist(), inputs.context_lengths.tolist()
        logits: dict[int, Tensor] = {}
        features = []
        for row, context, first, end in zip(rows, contexts, starts[:-1], starts[1:], strict=True):
            mine = [index for index in wanted if first <= index < end]
            if len(mine) > 1:
                raise EngineError(f"a prefill pass gives the logits of one row per request, asked for {len(mine)}")
            chosen = mine[0] if mine else end - 1
            placed = {
                "input_ids": inputs.input_ids[first:end].to(torch.int32).unsqueeze(0),
                "positions": inputs.positions[first:end].to(torch.int32).unsqueeze(0),
                "write_starts": self._int32([context]),
                "key_lengths": self._int32([context + end - first]),
                "logit_rows": self._int32([chosen - first]).unsqueeze(0),
            }
            outputs = self._run_target(placed, slice(row, row + 1))
            logits[chosen] = outputs["logits"].view(1, -1)
            features.append(self._features(outputs, end - first))
        return TargetOutputs(torch.cat([logits[index] for index in wanted]), torch.cat(features))

    def _run_target(self, placed: dict[str, Tensor], rows: slice) -> Mapping[str, Tensor]:
        inputs = {**placed, **self._target_rope, **cache_inputs(self._target_caches, rows)}
        return self._runner.run("target", inputs, recurring=rows == _EVERY_ROW)

    @torch.inference_mode()
    def inject(
        self, features: Tensor, positions: Tensor, slots: Tensor, *, queries_per_request: int | None = None
    ) -> None:
        """See ``EngineSession.inject``. A dropped row is written where the row's next pass writes, and never seen."""
        if queries_per_request is None:
            for first, end in _runs(slots.tolist()):
                row = int(slots[first]) // self.limits.page_tokens
                self._run_inject(
                    features[None, first:end],
                    positions[None, first:end],
                    positions[first : first + 1],
                    slice(row, row + 1),
                )
            return
        queries = queries_per_request
        by_request = slots.view(-1, queries).amax(1)
        # A request of which nothing is kept has no slot to tell its row: its rows go to the scratch row.
        rows = torch.where(by_request < 0, self._rows - 1, by_request // self.limits.page_tokens)
        places = positions.view(-1, queries)
        wide = features.new_zeros(self._rows, queries, features.shape[-1])
        wide.index_copy_(0, rows, features.view(-1, queries, features.shape[-1]))
        self._run_inject(
            wide,
            self._by_row(rows, places, 0),
            self._by_row(rows, places[:, 0], self.limits.page_tokens),
            _EVERY_ROW,
        )

    def _run_inject(self, features: Tensor, positions: Tensor, starts: Tensor, rows: slice) -> None:
        self._runner.run(
            "inject",
            {
                "features": features.to(self.dtype),
                "positions": positions.to(torch.int32),
                "write_starts": starts.to(torch.int32),
                **self._drafter_rope,
                **cache_inputs(self._drafter_caches, rows),
            },
            recurring=rows == _EVERY_ROW,
        )

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, block_size: int) -> DraftOutputs:
        """The network drafts the engine's block; a smaller one is a block of which fewer rows exist."""
        rows = inputs.page_table[:, 0]
        proposals, built = block_size - 1, self.limits.block_size - 1
        uniforms = torch.zeros(self._rows, built, dtype=torch.float32, device=self.device)
        uniforms[:, :proposals] = self._by_row(rows, inputs.uniforms, 0.0)
        outputs = self._runner.run(
            "draft",
            {
                "anchors": self._by_row(rows, inputs.anchors, 0),
                "context_lengths": self._by_row(rows, inputs.context_lengths, 0),
                "block_lengths": self._by_row(rows, inputs.block_lengths.clamp_max(block_size), 1),
                "write_starts": self._by_row(rows, inputs.context_lengths, self.limits.page_tokens),
                "temperatures": self._by_row(rows, inputs.temperatures, 0.0),
                "uniforms": uniforms,
                **self._drafter_rope,
                **cache_inputs(self._drafter_caches, _EVERY_ROW),
            },
            recurring=True,
        )

        def mine(name: str) -> Tensor:
            return outputs[name].index_select(0, rows)[:, :proposals]

        return DraftOutputs(mine("draft_tokens").long(), mine("candidates").long(), mine("q_rows"))

    def _by_row(self, rows: Tensor, values: Tensor, placeholder: Tensor | float) -> Tensor:
        """``values [B, ..]`` at cache rows ``rows [B]`` of ``[rows, ..]``, integers as int32."""
        dtype = values.dtype if values.is_floating_point() else torch.int32
        out = torch.empty(self._rows, *values.shape[1:], dtype=dtype, device=self.device)
        if isinstance(placeholder, Tensor):
            out.copy_(placeholder)
        else:
            out.fill_(placeholder)
        return out.index_copy_(0, rows, values.to(dtype))

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Ranges of consecutive slots: one per request, since rows of a cache never touch (each has a tail).

    Slot 0 does not follow -1, which is nowhere.
    """
    breaks = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1 or slots[i - 1] < 0]
    bounds = [0, *breaks, len(slots)]
    return [(first, end) for first, end in pairwise(bounds) if slots[first] >= 0]

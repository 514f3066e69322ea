"""Running plugin-lowered TensorRT networks: packed rows and paged caches, which is what the runtime speaks already.

What is left to do here: indices become int32, a block smaller than the engine's becomes one of which fewer rows exist,
and the largest number of queries of one request becomes the length of a tensor (``query_extent``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.network_session import NetworkRunner, NetworkSession, cache_inputs
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, TargetInputs, TargetOutputs
from trtllm_dflash.engine.tensorrt_emission import paged_positions, prefill_queries
from trtllm_dflash.engine.tensorrt_plugin_emit import most_pages, pages_per_request
from trtllm_dflash.errors import ConfigError

_ALL = slice(None)


class PagedSession(NetworkSession):
    """``EngineSession`` over plugin-lowered networks; caches are ``[pages + 1, page_tokens, kv_heads, head_dim]``.

    Args:
        target_config, drafter_config: what runs. limits: the engine's.
        runner: computes the networks. device: of every tensor. dtype: of caches and features.
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
        weight_bytes: int = 0,
    ) -> None:
        super().__init__(
            target_config,
            drafter_config,
            limits,
            runner=runner,
            device=device,
            dtype=dtype,
            positions=paged_positions(limits),
            row_tokens=limits.page_tokens,
            weight_bytes=weight_bytes,
        )
        # Only its length is read, so every pass may have a piece of the same memory.
        self._extent = torch.zeros(max(prefill_queries(limits), limits.block_size), dtype=torch.int32, device=device)
        rows = max(limits.max_num_tokens, limits.max_batch_size * limits.block_size)
        self._every_row = torch.arange(rows, dtype=torch.int32, device=device)

    def _cache_shape(self, pages: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (pages, self.limits.page_tokens, kv_heads, head_dim)

    def allocate_caches(self, num_pages: int) -> None:
        """See ``EngineSession``.

        Raises:
            ConfigError: more pages than the plans were built for.
        """
        most = most_pages(self.limits)
        if num_pages > most:
            raise ConfigError(
                f"{num_pages} KV cache pages of {self.limits.page_tokens} tokens were asked for, the plans were built "
                f"for at most {most}",
                hint="ask for fewer, or build with a larger --max-batch-size or --max-seq-len",
            )
        super().allocate_caches(num_pages)

    @torch.inference_mode()
    def target(self, inputs: TargetInputs) -> TargetOutputs:
        """See ``EngineSession``."""
        tokens, recurring = inputs.input_ids.shape[0], inputs.queries_per_request is not None
        logit_rows = self._every_row[:tokens] if inputs.logit_rows is None else _int32(inputs.logit_rows)
        outputs = self._runner.run(
            "target",
            {
                "input_ids": _int32(inputs.input_ids),
                "positions": _int32(inputs.positions),
                "slots": _int32(inputs.slots),
                "page_table": self._page_table(inputs.page_table, recurring=recurring),
                "context_lengths": _int32(inputs.context_lengths),
                "query_starts": _int32(inputs.query_starts),
                "query_extent": self._extent[: inputs.max_query],
                "logit_rows": logit_rows,
                **self._target_rope,
                **cache_inputs(self._target_caches, _ALL),
            },
            recurring=recurring,
        )
        return TargetOutputs(outputs["logits"], self._features(outputs, tokens))

    @torch.inference_mode()
    def inject(
        self, features: Tensor, positions: Tensor, slots: Tensor, *, queries_per_request: int | None = None
    ) -> None:
        """See ``EngineSession``."""
        self._runner.run(
            "inject",
            {
                "features": features.to(self.dtype).contiguous(),
                "positions": _int32(positions),
                "slots": _int32(slots),
                **self._drafter_rope,
                **cache_inputs(self._drafter_caches, _ALL),
            },
            recurring=queries_per_request is not None,
        )

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, block_size: int) -> DraftOutputs:
        """The network drafts the engine's block; a smaller one is a block of which fewer rows exist."""
        proposals, built = block_size - 1, self.limits.block_size - 1
        uniforms = inputs.uniforms
        if proposals < built:
            uniforms = torch.nn.functional.pad(uniforms, (0, built - proposals))
        outputs = self._runner.run(
            "draft",
            {
                "anchors": _int32(inputs.anchors),
                "context_lengths": _int32(inputs.context_lengths),
                "block_lengths": _int32(inputs.block_lengths.clamp_max(block_size)),
                "page_table": self._page_table(inputs.page_table, recurring=True),
                "temperatures": inputs.temperatures,
                "uniforms": uniforms.contiguous(),
                **self._drafter_rope,
                **cache_inputs(self._drafter_caches, _ALL),
            },
            recurring=True,
        )

        def mine(name: str) -> Tensor:
            return outputs[name][:, :proposals]

        return DraftOutputs(mine("draft_tokens").long(), mine("candidates").long(), mine("q_rows"))

    def _page_table(self, table: Tensor, *, recurring: bool) -> Tensor:
        """int32; of a recurring pass with every column that a request may have.

        The runtime's table grows with the longest request, and a captured pass has one shape. Pages beyond a request's
        visible length are never read.
        """
        missing = pages_per_request(self.limits) - table.shape[1] if recurring else 0
        return _int32(torch.nn.functional.pad(table, (0, missing)) if missing else table)


def _int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()

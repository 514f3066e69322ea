"""The native lowering's inputs: linear caches, one cache row per request, tokens ``[B, S]``."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import (
    PREFILL_OPTIMUM,
    EmittedNetwork,
    NetworkRequest,
    Profile,
    linear_row_tokens,
    prefill_queries,
    row_buckets,
)
from trtllm_dflash.engine.tensorrt_placement import Placement
from trtllm_dflash.ops.tensorrt_native import LinearPass, NativeOps
from trtllm_dflash.ops.tensorrt_network import Columns


class LinearInputs:
    """``LoweredInputs`` of linear caches (B cache rows, S tokens of each; int32).

    Args:
        request: what is emitted. emitted: the network.
    """

    tokens: tuple[int | str, ...] = ("B", "S")
    logit_rows: tuple[int | str, ...] = ("B", "R")

    def __init__(self, request: NetworkRequest, emitted: EmittedNetwork) -> None:
        self.ops = NativeOps(emitted.writer, emitted.writer.dtype(request.dtype), ranks=request.ranks)
        self.positions = linear_row_tokens(request.limits)
        emitted.row_tokens = self.positions
        self._limits = request.limits
        self._emitted = emitted
        self._int32 = request.library.trt.int32

    def target(self) -> Placement:
        """See ``LoweredInputs``."""
        return self._placed(with_lengths=True)

    def inject(self) -> Placement:
        """See ``LoweredInputs``."""
        return self._placed(with_lengths=False)

    def _placed(self, *, with_lengths: bool) -> Placement:
        positions = self._emitted.input("positions", self._int32, "B", "S")
        starts = self._emitted.input("write_starts", self._int32, "B").parts[0]
        lengths = self._emitted.input("key_lengths", self._int32, "B").parts[0] if with_lengths else None
        where = LinearPass(positions.parts[0], starts, lengths)
        return Placement(positions, where, where, where, where)

    def draft(self, context_lengths: Columns, block_lengths: Columns, block_size: int) -> LinearPass:
        """See ``LoweredInputs``."""
        starts = self._emitted.input("write_starts", self._int32, "B").parts[0]
        return LinearPass(
            positions=self.ops.block_positions(context_lengths, block_size).parts[0],
            write_starts=starts,
            key_lengths=self.ops.w.elementwise("SUM", context_lengths.parts[0], block_lengths.parts[0]),
        )

    def cache_shape(self, kv_heads: int, head_dim: int) -> Sequence[int | str]:
        """See ``LoweredInputs``."""
        return ("B", kv_heads, self.positions, head_dim)

    def profiles(self, network: Network) -> list[Profile]:
        """Prefill of one row, then verify in buckets of rows up to every slot and the scratch row."""
        longest, block = prefill_queries(self._limits), self._limits.block_size
        one = (1, 1, 1)
        prefill = Profile("prefill", {"B": one, "S": (1, min(PREFILL_OPTIMUM, longest), longest), "R": one})
        profiles = [] if network == "draft" else [prefill]
        smallest = 1
        for largest in row_buckets(self._limits.max_batch_size + 1):
            rows = (smallest, largest, largest)
            ranges = {"B": rows, "S": (1, block, block), "R": (1, block, block)}
            profiles.append(Profile(f"verify up to {largest}", ranges))
            smallest = largest + 1
        return profiles

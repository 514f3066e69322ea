"""The plugin lowering's inputs: packed rows, paged caches that layers update in place."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import (
    PREFILL_OPTIMUM,
    EmittedNetwork,
    NetworkRequest,
    Profile,
    paged_positions,
    prefill_queries,
    row_buckets,
)
from trtllm_dflash.engine.tensorrt_placement import Placement
from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.tensorrt_network import Columns
from trtllm_dflash.ops.tensorrt_plugin import PluginOps

# A cache may have more pages than running requests need: pages of prefixes that are kept. Cache tensors are inputs, so
# a larger maximum takes no memory.
_MOST_CACHE_OVER_BATCH = 4


class PagedInputs:
    """``LoweredInputs`` of paged caches (T packed tokens, B requests, P pages of each, C pages of the caches with the
    scratch page, R logit rows, M most tokens of one request; int32).

    Args:
        request: what is emitted. emitted: the network.

    Raises:
        BuildError: this TensorRT has no plugin layers.
    """

    tokens: tuple[int | str, ...] = ("T",)
    logit_rows: tuple[int | str, ...] = ("R",)

    def __init__(self, request: NetworkRequest, emitted: EmittedNetwork) -> None:
        if request.plugins is None or not hasattr(emitted.network, "add_plugin_v3"):
            raise BuildError(
                f"network {emitted.name}: {request.library.backend} has no plugin layers",
                hint="the plugin lowering needs full TensorRT 11 and the compiled plugin library",
            )
        dtype = emitted.writer.dtype(request.dtype)
        self.ops = PluginOps(emitted.writer, dtype, ranks=request.ranks, plugins=request.plugins)
        self.positions = paged_positions(request.limits)
        self._limits = request.limits
        self._emitted = emitted

    def _input(self, name: str, *shape: int | str) -> Columns:
        return self._emitted.input(name, self._emitted.writer.trt.int32, *shape)

    def target(self) -> Placement:
        """See ``LoweredInputs``. ``query_extent`` says by its length how many queries one request has at most."""
        return Placement(
            positions=self._input("positions", "T"),
            slots=self._input("slots", "T"),
            page_table=self._input("page_table", "B", "P"),
            context_lengths=self._input("context_lengths", "B"),
            query_starts=self._input("query_starts", "Q"),
            max_query=self._input("query_extent", "M"),
        )

    def inject(self) -> Placement:
        """See ``LoweredInputs``."""
        return Placement(positions=self._input("positions", "T"), slots=self._input("slots", "T"))

    def draft(self, context_lengths: Columns, block_lengths: Columns, block_size: int) -> Columns:
        """See ``LoweredInputs``."""
        return self._input("page_table", "B", "P")

    def cache_shape(self, kv_heads: int, head_dim: int) -> Sequence[int | str]:
        """See ``LoweredInputs``."""
        return ("C", self._limits.page_tokens, kv_heads, head_dim)

    def profiles(self, network: Network) -> list[Profile]:
        """Verify in buckets of requests, then prefill of any requests within the token budget.

        The session takes the first profile that has room, so the narrow ones stand first.
        """
        limits = self._limits
        batch, block = limits.max_batch_size, limits.block_size
        pages = pages_per_request(limits)
        half = max(1, pages // 2)
        cache = {"C": (2, batch * half + 1, most_pages(limits) + 1), "P": (1, half, pages)}
        profiles = []
        smallest = 1
        for most in row_buckets(batch):
            rows = (1, most * block, most * block)
            requests = {"B": (smallest, most, most), "Q": (smallest + 1, most + 1, most + 1)}
            verify = {"T": rows, "R": rows, "M": (1, block, block), **requests, **cache}
            profiles.append(Profile(f"verify up to {most}", verify))
            smallest = most + 1
        if network != "draft":
            tokens, longest = limits.max_num_tokens, prefill_queries(limits)
            optimum = min(PREFILL_OPTIMUM, tokens)
            requests = {"B": (1, 1, batch), "Q": (2, 2, batch + 1), "R": (1, 1, batch)}
            packed = {"T": (1, optimum, tokens), "M": (1, min(optimum, longest), longest)}
            profiles.append(Profile("prefill", {**packed, **requests, **cache}))
        return profiles


def pages_per_request(limits: BuildLimits) -> int:
    """Pages that one sequence of max_seq_len takes."""
    return -(-limits.max_seq_len // limits.page_tokens)


def most_pages(limits: BuildLimits) -> int:
    """Pages, without the scratch page, that a cache of a paged plan has at most."""
    return _MOST_CACHE_OVER_BATCH * limits.max_batch_size * pages_per_request(limits)

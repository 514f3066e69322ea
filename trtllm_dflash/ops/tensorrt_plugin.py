"""The plugin lowering: the special operations as layers of ``libdflash_plugins.so`` over paged caches.

Rows are packed, ``[N, ..]``, heads ``[N, heads, head_dim]``, exactly the shapes of the operation set. Inputs, outputs
and fields of the plugins are documented in ``plugins/tensorrt/README.md``; this file is their only user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.ops.tensorrt_dense import RotaryAt, TensorRTDense, Vector
from trtllm_dflash.ops.tensorrt_network import Columns, NetworkTensor

PLUGIN_VERSION = "1"
PLUGIN_NAMES = (
    "DFlashPagedAttention",
    "DFlashKVInjection",
    "DFlashGroupedConv",
    "DFlashCandidates",
    "DFlashSelectorWalk",
)
MOST_CANDIDATES = 32

FieldValue = int | float


class PluginLayers(Protocol):
    """Adds plugin layers to a network."""

    def add(self, network: Any, name: str, fields: Mapping[str, FieldValue], inputs: Sequence[NetworkTensor]) -> Any:
        """A layer of plugin ``name``; None when the plugin or TensorRT refuses."""


def plugin_registry(trt: Any, library_file: str) -> Any:
    """TensorRT's plugin registry with ``libdflash_plugins.so`` in it: for building plans and for loading them.

    Args:
        trt: the TensorRT module. library_file: the library; a process has one at a time.

    Raises:
        BuildError: the library does not load.
    """
    registry = trt.get_plugin_registry()
    # Loading it twice logs an error, which would be fatal, and so does asking for a creator that is not there.
    is_loaded = any(creator.name == PLUGIN_NAMES[0] for creator in registry.all_creators)
    if not is_loaded and registry.load_library(library_file) is None:
        raise BuildError(
            f"{library_file}: TensorRT cannot load this plugin library",
            hint="compile it for this machine: trtllm-dflash plugins build",
        )
    return registry


class RegistryPluginLayers:
    """Plugins from TensorRT's registry.

    Args:
        trt: the TensorRT module. library_file: ``libdflash_plugins.so``.

    Raises:
        BuildError: the library does not load.
    """

    def __init__(self, trt: Any, library_file: str) -> None:
        self._trt = trt
        self._registry = plugin_registry(trt, library_file)

    def add(self, network: Any, name: str, fields: Mapping[str, FieldValue], inputs: Sequence[NetworkTensor]) -> Any:
        """See :class:`PluginLayers`."""
        import numpy as np

        trt = self._trt
        creator = self._registry.get_creator(name, PLUGIN_VERSION, "")
        if creator is None:
            raise BuildError(f"the plugin library has no {name}", hint="trtllm-dflash plugins info shows what it has")
        values = []
        for field, value in fields.items():
            kind = trt.PluginFieldType.FLOAT32 if isinstance(value, float) else trt.PluginFieldType.INT32
            data = np.array([value], dtype=np.float32 if isinstance(value, float) else np.int32)
            values.append(trt.PluginField(field, data, kind))
        plugin = creator.create_plugin(name, trt.PluginFieldCollection(values), trt.TensorRTPhase.BUILD)
        return None if plugin is None else network.add_plugin_v3(list(inputs), [], plugin)


@dataclass(frozen=True)
class PagedPlan:
    """One target pass: where its queries are, and a tensor as long as the most queries of one request."""

    page_table: NetworkTensor
    context_lengths: NetworkTensor
    query_starts: NetworkTensor
    query_extent: NetworkTensor


@dataclass(frozen=True)
class PagedBlockPlan:
    """One draft block per request."""

    page_table: NetworkTensor
    context_lengths: NetworkTensor
    block_lengths: NetworkTensor
    block_size: int


@dataclass(frozen=True)
class _PendingWrite:
    k: NetworkTensor
    v: NetworkTensor
    slots: NetworkTensor


class PluginOps(TensorRTDense):
    """``Ops[Columns]`` with plugin layers; documented in :class:`trtllm_dflash.ops.interface.Ops`.

    A write to a cache waits: attention over that cache takes it into its own layer, and :meth:`finish_writes` turns
    what is left (injection, which attends to nothing) into one layer for all of them.
    """

    def __init__(self, *args: Any, plugins: PluginLayers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plugins = plugins
        self._pending: dict[str, tuple[CacheLayer[Columns], _PendingWrite]] = {}

    def _plugin(self, name: str, fields: Mapping[str, FieldValue], inputs: Sequence[NetworkTensor]) -> Any:
        layer = self._plugins.add(self.w.network, name, fields, inputs)
        self.w.add(name, layer)
        return layer

    # Heads
    def heads(self, x: Columns, first: int, count: int, head_dim: int) -> Columns:
        taken = self.take_columns(x, first * head_dim, count * head_dim)
        return self.one(self.w.reshape(taken, (0, count, head_dim)))

    def merge_heads(self, x: Columns) -> Columns:
        whole = self.whole(x)
        return self.one(self.w.reshape(whole, (0, whole.shape[1] * whole.shape[2])))

    def rotary(self, x: Columns, rows: RotaryAt) -> Columns:
        whole = self.whole(x)
        heads, head_dim = whole.shape[1], whole.shape[2]
        each_row = RotaryAt(rows.table, self.w.reshape(rows.positions, (0, 1)))
        turned = self.rotate(self.w.reshape(whole, (0, heads, 1, head_dim)), each_row)
        return self.one(self.w.reshape(turned, (0, heads, head_dim)))

    # Caches and attention
    def write_kv(self, cache: CacheLayer[Columns], k: Columns, v: Columns, slots: Columns) -> None:
        name = self.whole(cache.k).name
        self._pending[name] = (cache, _PendingWrite(self.whole(k), self.whole(v), self.whole(slots)))

    def finish_writes(self) -> None:
        """Emit writes that no attention took: one layer for all caches, rows already normed and rotated."""
        if not self._pending:
            return
        w = self.w
        w.near = "injection"
        writes = list(self._pending.values())
        self._pending.clear()
        kv_heads, head_dim = writes[0][1].k.shape[1:]
        rows = w.concat([self._flat(part) for _, write in writes for part in (write.k, write.v)], 1)
        caches = [self.whole(place) for cache, _ in writes for place in (cache.k, cache.v)]
        fields = {"layers": len(writes), "num_kv_heads": kv_heads, "head_dim": head_dim}
        layer = self._plugin("DFlashKVInjection", fields, [rows, writes[0][1].slots, *caches])
        for index, cache_input in enumerate(caches):
            self.updated[cache_input.name] = layer.get_output(index)

    def plan_attention(
        self,
        page_table: Columns,
        context_lengths: Columns,
        query_starts: Columns,
        max_query: Any,
        *,
        queries_per_request: int | None,
        total_queries: int,
    ) -> PagedPlan:
        # The bound changes from pass to pass. As a field it would be the largest prefill, and every verify pass would
        # launch for that many queries of each request; as the length of an input it is the pass's own.
        inputs = (page_table, context_lengths, query_starts, max_query)
        return PagedPlan(*(self.whole(x) for x in inputs))

    def paged_attention(
        self, plan: PagedPlan, q: Columns, cache: CacheLayer[Columns], *, scale: float, window: int | None
    ) -> Columns:
        query, k_cache, v_cache = self.whole(q), self.whole(cache.k), self.whole(cache.v)
        _, write = self._pending.pop(k_cache.name)
        fields = {
            **self._attention_fields(query, k_cache, scale, window),
            "write_kv": 1,
            "causal": 1,
            "query_extent": 1,
        }
        qkv = self.w.concat([self._flat(part) for part in (query, write.k, write.v)], 1)
        where = [plan.page_table, plan.context_lengths, plan.query_starts, write.slots, plan.query_extent]
        layer = self._plugin("DFlashPagedAttention", fields, [qkv, k_cache, v_cache, *where])
        self.updated[k_cache.name], self.updated[v_cache.name] = layer.get_output(1), layer.get_output(2)
        return self.one(layer.get_output(0))

    def plan_block_attention(
        self, page_table: Columns, context_lengths: Columns, block_lengths: Columns, block_size: int
    ) -> PagedBlockPlan:
        return PagedBlockPlan(
            self.whole(page_table), self.whole(context_lengths), self.whole(block_lengths), block_size
        )

    def block_attention(
        self,
        plan: PagedBlockPlan,
        q: Columns,
        k_block: Columns,
        v_block: Columns,
        cache: CacheLayer[Columns],
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Columns:
        query, k_cache = self.whole(q), self.whole(cache.k)
        fields = {
            **self._attention_fields(query, k_cache, scale, window),
            "block_size": plan.block_size,
            "causal": int(causal),
        }
        rows = [query, self.whole(k_block), self.whole(v_block), k_cache, self.whole(cache.v)]
        where = [plan.page_table, plan.context_lengths, plan.block_lengths]
        return self.one(self._plugin("DFlashPagedAttention", fields, [*rows, *where]).get_output(0))

    def _attention_fields(
        self, query: NetworkTensor, k_cache: NetworkTensor, scale: float, window: int | None
    ) -> dict[str, FieldValue]:
        return {
            "num_heads": query.shape[1],
            "num_kv_heads": k_cache.shape[2],
            "head_dim": query.shape[2],
            "scale": float(scale),
            "window": window or 0,
        }

    def _flat(self, x: NetworkTensor) -> NetworkTensor:
        return self.w.reshape(x, (0, x.shape[1] * x.shape[2]))

    # DFlash 2
    def grouped_dynamic_conv(self, x: Columns, dynamic: Columns, base: Vector, block_size: int) -> Columns:
        rows, deltas, kernel = self.whole(x), self.whole(dynamic), base.weight
        taps = kernel.shape[0]
        fields = {"block_size": block_size, "groups": deltas.shape[-1] // taps, "taps": taps}
        return self.one(self._plugin("DFlashGroupedConv", fields, [rows, deltas, kernel]).get_output(0))

    def top_k(self, x: Columns, k: int) -> tuple[Columns, Columns]:
        if k > MOST_CANDIDATES:
            values, indices = super().top_k(x, k)
            return values, self.one(self.w.cast(self.whole(indices), self.w.trt.int64))
        self.w.near = "candidates"
        layer = self._plugin("DFlashCandidates", {"count": k}, [self.whole(x)])
        return self.one(layer.get_output(0)), self.one(layer.get_output(1))

    def selector_walk(
        self,
        unary: Columns,
        candidates: Columns,
        hidden: Columns,
        predecessor_codebook: Vector,
        successor_codebook: Vector,
        anchors: Columns,
        temperatures: Columns,
        uniforms: Columns,
    ) -> tuple[Columns, Columns]:
        w = self.w
        w.near = "candidate_selector"
        layer = self._plugin(
            "DFlashSelectorWalk",
            {},
            [
                self.whole(unary),
                self.whole(candidates),
                self.whole(hidden),
                predecessor_codebook.weight,
                successor_codebook.weight,
                w.cast(self.whole(anchors), w.trt.int64),
                self.whole(temperatures),
                self.whole(uniforms),
            ],
        )
        return self.one(layer.get_output(0)), self.one(layer.get_output(1))

    # Shape plumbing
    def block_ids(self, anchors: Columns, mask_token_id: int, block_size: int) -> Columns:
        return self.one(self.w.reshape(self.whole(super().block_ids(anchors, mask_token_id, block_size)), (-1,)))

    def block_positions(self, context_lengths: Columns, block_size: int) -> Columns:
        return self.one(self.w.reshape(self.whole(super().block_positions(context_lengths, block_size)), (-1,)))

    def proposal_rows(self, x: Columns, block_size: int) -> Columns:
        whole = self.whole(x)
        width = whole.shape[-1]
        blocks = self.w.reshape(whole, (-1, block_size, width))
        return self.one(self.w.reshape(self.w.slice(blocks, 1, 1, block_size - 1), (-1, width)))

    def per_request(self, x: Columns, rows: int) -> Columns:
        whole = self.whole(x)
        return self.one(self.w.reshape(whole, (-1, rows, whole.shape[-1])))

    def take_rows(self, x: Columns, rows: Columns) -> Columns:
        return self.one(self.w.gather(self.whole(x), self.whole(rows), 0))

"""A network with plugin layers where TensorRT has none, and its computation by the torch definitions.

TensorRT-RTX builds no plugin layers, so a recorded network stands in: each plugin's outputs become inputs of the real
network, with the types and shapes that ``plugins/tensorrt/README.md`` promises, and the interpreter computes them at
the place where the layer would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from network_interpreter import NetworkInterpreter, Values
from torch import Tensor

from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.ops import torch_attention, torch_select
from trtllm_dflash.ops.interface import CacheLayer


@dataclass
class PluginLayer:
    """A recorded layer: where it stands among the network's own layers, and its tensors."""

    plugin: str
    fields: dict[str, Any]
    inputs: list[Any]
    outputs: list[Any]
    position: int
    name: str = ""

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class RecordedNetwork:
    """An INetworkDefinition that also has ``add_plugin_v3``; everything else is the real network's."""

    def __init__(self, network: Any) -> None:
        self.real = network
        self.layers: list[PluginLayer] = []
        self.extra_outputs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def add_plugin_v3(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], plugin: Any) -> Any:
        raise AssertionError("recorded plugins are added by RecordedPlugins")

    def mark_output(self, tensor: Any) -> None:
        # An output of a recorded layer is an input of the real network, which cannot be its output as well.
        if any(tensor is output for layer in self.layers for output in layer.outputs):
            self.extra_outputs.append(tensor)
        else:
            self.real.mark_output(tensor)


class RecordedPlugins:
    """``PluginLayers`` that checks inputs against the plugins' documented signatures and records the layer."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt

    def add(self, network: RecordedNetwork, name: str, fields: Mapping[str, Any], inputs: Sequence[Any]) -> PluginLayer:
        outputs = getattr(self, "_" + name)(dict(fields), list(inputs))
        index = len(network.layers)
        proxies = [
            network.real.add_input(f"plugin.{index}.{n}", dtype, tuple(shape))
            for n, (dtype, shape) in enumerate(outputs)
        ]
        layer = PluginLayer(name, dict(fields), list(inputs), proxies, network.real.num_layers)
        network.layers.append(layer)
        return layer

    def _DFlashPagedAttention(self, fields: dict[str, Any], inputs: list[Any]) -> list[tuple[Any, Sequence[int]]]:
        assert set(fields) <= {
            "num_heads", "num_kv_heads", "head_dim", "scale", "block_size", "write_kv", "causal", "window", "softcap",
            "query_extent",
        }  # fmt: skip
        assert isinstance(fields["scale"], float)
        index = {self.trt.int32, self.trt.int64}
        heads, kv_heads, head_dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
        if fields.get("write_kv"):
            qkv, k_cache, v_cache, *where = inputs
            assert len(where) == 5
            assert fields["query_extent"] == 1
            assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim
            first, outputs = qkv, [(c.dtype, c.shape) for c in (k_cache, v_cache)]
        else:
            assert fields["block_size"] > 0
            q, k_block, v_block, k_cache, v_cache, *where = inputs
            assert len(where) == 3
            assert tuple(q.shape)[1:] == (heads, head_dim)
            assert tuple(k_block.shape)[1:] == tuple(v_block.shape)[1:] == (kv_heads, head_dim)
            first, outputs = q, []
        assert tuple(k_cache.shape)[2:] == (kv_heads, head_dim)
        assert len({tensor.dtype for tensor in where} & index) == 1
        return [(first.dtype, (-1, heads, head_dim)), *outputs]

    def _DFlashKVInjection(self, fields: dict[str, Any], inputs: list[Any]) -> list[tuple[Any, Sequence[int]]]:
        assert set(fields) == {"layers", "num_kv_heads", "head_dim"}
        rows, slots, *caches = inputs
        assert rows.shape[1] == fields["layers"] * 2 * fields["num_kv_heads"] * fields["head_dim"]
        assert len(slots.shape) == 1
        assert len(caches) == 2 * fields["layers"]
        return [(cache.dtype, cache.shape) for cache in caches]

    def _DFlashGroupedConv(self, fields: dict[str, Any], inputs: list[Any]) -> list[tuple[Any, Sequence[int]]]:
        assert set(fields) == {"block_size", "groups", "taps"}
        x, dynamic, base = inputs
        assert x.dtype == dynamic.dtype == base.dtype
        assert tuple(base.shape) == (fields["taps"], x.shape[1])
        assert dynamic.shape[1] >= fields["taps"] * fields["groups"]
        return [(x.dtype, x.shape)]

    def _DFlashCandidates(self, fields: dict[str, Any], inputs: list[Any]) -> list[tuple[Any, Sequence[int]]]:
        assert set(fields) == {"count"}
        assert fields["count"] <= 32
        return [(self.trt.float32, (-1, fields["count"])), (self.trt.int64, (-1, fields["count"]))]

    def _DFlashSelectorWalk(self, fields: dict[str, Any], inputs: list[Any]) -> list[tuple[Any, Sequence[int]]]:
        assert fields == {}
        unary, candidates, hidden, predecessor, successor, anchors, temperatures, uniforms = inputs
        f32, i64 = self.trt.float32, self.trt.int64
        assert [t.dtype for t in (unary, candidates, anchors, temperatures, uniforms)] == [f32, i64, i64, f32, f32]
        assert hidden.dtype == predecessor.dtype == successor.dtype
        positions, count = candidates.shape[1], candidates.shape[2]
        return [(i64, (-1, positions)), (f32, (-1, positions, count))]


class RecordedInterpreter(NetworkInterpreter):
    """Computes a recorded network: plugin layers by the torch definitions of their operations."""

    def __init__(
        self,
        trt: Any,
        network: RecordedNetwork,
        constants: Mapping[str, Tensor],
        collective: Callable[[str, str, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(trt, network.real, constants, collective)
        self.recorded = network
        proxies = {output.name for layer in network.layers for output in layer.outputs}
        self.inputs = {name: tensor for name, tensor in self.inputs.items() if name not in proxies}
        self.outputs += [tensor.name for tensor in network.extra_outputs]
        # A plugin may read what a layer before it made, whenever the network's own layers are done with it.
        self.steps = [(step, []) for step, _ in self.steps]
        self.at: dict[int, list[PluginLayer]] = {}
        for layer in network.layers:
            self.at.setdefault(layer.position, []).append(layer)

    def run(self, inputs: Mapping[str, Tensor]) -> Values:
        values = {name: self._bound(declared, inputs[name]) for name, declared in self.inputs.items()}
        for position in range(len(self.steps) + 1):
            for layer in self.at.get(position, ()):
                results = compute_plugin(layer, [values[tensor.name] for tensor in layer.inputs])
                for tensor, result in zip(layer.outputs, results, strict=True):
                    assert result.dtype == self.dtypes[tensor.dtype], (layer.name, tensor.name)
                    values[tensor.name] = result
            if position < len(self.steps):
                self.steps[position][0](values)
        return {name: values[name] for name in self.outputs}


def compute_plugin(layer: PluginLayer, inputs: list[Tensor]) -> list[Tensor]:
    """The layer's outputs; caches are written in place and returned, as aliased outputs are."""
    fields = layer.fields
    if layer.plugin == "DFlashPagedAttention":
        options = {"scale": fields["scale"], "window": fields["window"] or None}
        heads, kv_heads, head_dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
        if fields.get("write_kv"):
            qkv, k_cache, v_cache, table, context, starts, slots, extent = inputs
            q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
            cache = CacheLayer(k_cache, v_cache)
            torch_attention.write_kv(cache, k, v, slots.long())
            lengths = starts.long()
            longest = int((lengths[1:] - lengths[:-1]).max())
            assert longest <= len(extent)
            plan = torch_attention.plan_attention(table.long(), context.long(), lengths, longest, None, len(qkv))
            return [torch_attention.paged_attention(plan, q, cache, **options), k_cache, v_cache]
        q, k, v, k_cache, v_cache, table, context, lengths = inputs
        block = torch_attention.plan_block_attention(table.long(), context.long(), lengths.long(), fields["block_size"])
        cache = CacheLayer(k_cache, v_cache)
        return [torch_attention.block_attention(block, q, k, v, cache, causal=bool(fields["causal"]), **options)]
    if layer.plugin == "DFlashKVInjection":
        rows, slots, *caches = inputs
        parts = rows.view(len(rows), fields["layers"], 2, fields["num_kv_heads"], fields["head_dim"])
        for index in range(fields["layers"]):
            cache = CacheLayer(caches[2 * index], caches[2 * index + 1])
            torch_attention.write_kv(cache, parts[:, index, 0], parts[:, index, 1], slots.long())
        return caches
    if layer.plugin == "DFlashGroupedConv":
        x, dynamic, base = inputs
        return [torch_select.grouped_dynamic_conv(x, dynamic, base, fields["block_size"])]
    if layer.plugin == "DFlashCandidates":
        values, ids = torch_select.top_k(inputs[0], fields["count"])
        return [values.float(), ids]
    assert layer.plugin == "DFlashSelectorWalk"
    tokens, q_rows = torch_select.selector_walk(*inputs)
    return [tokens, q_rows]


def recorded(request: NetworkRequest) -> NetworkRequest:
    """``request`` with plugin layers that are recorded."""
    return replace(
        request,
        lowering="plugin",
        plugins=RecordedPlugins(request.library.trt),
        new_definition=lambda builder: RecordedNetwork(builder.create_network(0)),
    )

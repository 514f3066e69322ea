"""A stand-in for full TensorRT 11 where only TensorRT-RTX is: its builder, plus plugin layers that compute nothing.

Put this folder on PYTHONPATH and ``import tensorrt`` finds it. All but the plugin layers is TensorRT-RTX's own: a plan
is really built, for SM120, of a network whose plugin layers are replaced by layers of the same output shapes and types.
Fields and inputs are checked against the plugins' documented signatures, and against the plugins themselves where the
compiled library is at hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx as rtx
from tensorrt_rtx import *  # noqa: F403

sys.path.append(str(Path(__file__).parents[2]))

from recorded_plugins import RecordedPlugins

__version__ = "11.1.0"
_NAMES = [name.removeprefix("_") for name in vars(RecordedPlugins) if name.startswith("_DFlash")]


class PluginField:
    """A field that can be read back."""

    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.data, self.kind = name, data, kind


class PluginFieldCollection(list[PluginField]):
    """Fields of one plugin."""


class _Plugin:
    def __init__(self, name: str, fields: dict[str, Any], compiled: Any) -> None:
        self.name, self.fields, self.compiled = name, fields, compiled


class _Creator:
    def __init__(self, name: str) -> None:
        self.name = name

    def create_plugin(self, layer: str, fields: PluginFieldCollection, phase: Any) -> _Plugin | None:
        compiled = None
        # TensorRT logs an error when it is asked for what it does not have.
        if _registry.holds_plugins:
            creator = rtx.get_plugin_registry().get_creator(self.name, "1", "")
            collection = rtx.PluginFieldCollection([rtx.PluginField(f.name, f.data, f.kind) for f in fields])
            compiled = creator.create_plugin(layer, collection, phase)
            if compiled is None:
                return None
        return _Plugin(self.name, {field.name: field.data[0].item() for field in fields}, compiled)


class _Registry:
    def __init__(self) -> None:
        self.holds_plugins = False
        self.all_creators: list[_Creator] = []

    def get_creator(self, name: str, version: str, namespace: str) -> _Creator | None:
        assert (version, namespace) == ("1", "")
        return next((creator for creator in self.all_creators if creator.name == name), None)

    def load_library(self, path: str) -> object | None:
        if not Path(path).is_file():
            return None
        self.all_creators = [_Creator(name) for name in _NAMES]
        # A test's library has no plugins in it, and then they do not check our fields.
        self.holds_plugins = rtx.get_plugin_registry().load_library(path) is not None
        return self


_registry = _Registry()


def get_plugin_registry() -> _Registry:
    """The one registry."""
    return _registry


class _PluginLayer:
    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.name = ""

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class _Network:
    """TensorRT-RTX's network with ``add_plugin_v3``."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.plugins: list[_Plugin] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: _Plugin) -> _PluginLayer:
        promised = getattr(RecordedPlugins(rtx), "_" + plugin.name)(plugin.fields, inputs)
        if plugin.compiled is not None:
            built = plugin.compiled.get_capability_interface(rtx.PluginCapabilityType.BUILD)
            assert built.num_outputs == len(promised), (plugin.name, built.num_outputs)
        outputs = getattr(self, "_" + plugin.name)(plugin.fields, inputs)
        for output, (dtype, shape) in zip(outputs, promised, strict=True):
            assert (output.dtype, tuple(output.shape)) == (dtype, tuple(shape)), plugin.name
        self.plugins.append(plugin)
        return _PluginLayer(outputs)

    def _same(self, tensor: Any) -> Any:
        return self.real.add_identity(tensor).get_output(0)

    def _columns(self, tensor: Any, count: int) -> Any:
        extent = self.real.add_shape(tensor).get_output(0)
        rows = self.real.add_slice(extent, (0,), (1,), (1,)).get_output(0)
        width = self.real.add_constant((1,), rtx.Weights(_array(count))).get_output(0)
        layer = self.real.add_slice(tensor, (0, 0), (0, count), (1, 1))
        layer.set_input(2, self.real.add_concatenation([rows, width]).get_output(0))
        return layer.get_output(0)

    def _reshaped(self, tensor: Any, *shape: int) -> Any:
        layer = self.real.add_shuffle(tensor)
        layer.reshape_dims = shape
        return layer.get_output(0)

    def _DFlashPagedAttention(self, fields: dict[str, Any], inputs: list[Any]) -> list[Any]:
        if not fields.get("write_kv"):
            return [self._same(inputs[0])]
        heads, head_dim = fields["num_heads"], fields["head_dim"]
        queries = self._reshaped(self._columns(inputs[0], heads * head_dim), -1, heads, head_dim)
        return [queries, self._same(inputs[1]), self._same(inputs[2])]

    def _DFlashKVInjection(self, fields: dict[str, Any], inputs: list[Any]) -> list[Any]:
        # Something must need the rows, or the builder drops all that makes them.
        used = self.real.add_reduce(inputs[0], rtx.ReduceOperation.SUM, 3, True).get_output(0)
        used = self._reshaped(used, 1, 1, 1, 1)
        first = self.real.add_elementwise(inputs[2], used, rtx.ElementWiseOperation.SUM).get_output(0)
        return [first, *(self._same(cache) for cache in inputs[3:])]

    def _DFlashGroupedConv(self, fields: dict[str, Any], inputs: list[Any]) -> list[Any]:
        return [self._same(inputs[0])]

    def _DFlashCandidates(self, fields: dict[str, Any], inputs: list[Any]) -> list[Any]:
        layer = self.real.add_topk(inputs[0], rtx.TopKOperation.MAX, fields["count"], 2, rtx.int32)
        return [layer.get_output(0), self.real.add_cast(layer.get_output(1), rtx.int64).get_output(0)]

    def _DFlashSelectorWalk(self, fields: dict[str, Any], inputs: list[Any]) -> list[Any]:
        narrow = self.real.add_cast(inputs[1], rtx.int32).get_output(0)
        best = self.real.add_topk(narrow, rtx.TopKOperation.MAX, 1, 4, rtx.int32).get_output(0)
        tokens = self._reshaped(best, 0, inputs[1].shape[1])
        return [self.real.add_cast(tokens, rtx.int64).get_output(0), self._same(inputs[0])]


def _array(value: int) -> Any:
    import numpy

    array = numpy.array([value], dtype=numpy.int64)
    _kept.append(array)
    return array


_kept: list[Any] = []


class Builder(rtx.Builder):  # type: ignore[misc, name-defined]
    """TensorRT-RTX's builder for SM120, with networks that have plugin layers."""

    def create_network(self, flags: int = 0) -> _Network:
        return _Network(super().create_network(flags))

    def create_builder_config(self) -> Any:
        config = super().create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM120, 0)
        return config

    def build_serialized_network_to_stream(self, network: _Network, config: Any, writer: Any) -> Any:
        assert config.get_preview_feature(rtx.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
        return super().build_serialized_network_to_stream(network.real, config, writer)

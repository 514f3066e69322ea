"""Computes an INetworkDefinition with torch: what the network says, not what wrote it.

Layers, attributes and constants are read back from the network object. Float, int and bool constants come from
TensorRT's own copy of the pointer; types that numpy lacks come from the writer's registry, by layer name.
A cache update writes into the tensor that is bound to its input, as the aliased output does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Values = dict[str, Tensor]
Step = Callable[[Values], None]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class NetworkInterpreter:
    """Args: ``trt``: the TensorRT module. ``network``: an INetworkDefinition. ``constants``: layer name → tensor.

    ``collective``: called with (layer name, recorded label, tensor), where ranks meet.
    """

    def __init__(
        self,
        trt,
        network,
        constants: Mapping[str, Tensor],
        collective: Callable[[str, str, Tensor], Tensor] | None = None,
    ) -> None:
        self.trt = trt
        self.network = network
        self.constants = constants
        self.collective = collective
        self.inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
        self.outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        self.attention: dict[str, tuple] = {}
        self.layer_types: dict[str, int] = {}
        self.dtypes = {
            trt.float32: torch.float32,
            trt.float16: torch.float16,
            trt.bfloat16: torch.bfloat16,
            trt.fp8: torch.float8_e4m3fn,
            trt.int8: torch.int8,
            trt.int32: torch.int32,
            trt.int64: torch.int64,
            trt.bool: torch.bool,
            # Kept unpacked, as the numbers its codes stand for.
            trt.fp4: torch.float32,
        }
        steps = [self._compile(network.get_layer(i)) for i in range(network.num_layers)]
        last_use: dict[str, int] = {}
        for index in range(network.num_layers):
            for name in _input_names(network.get_layer(index)):
                last_use[name] = index
        kept = {*self.outputs, *self.inputs}
        done: dict[int, list[str]] = {}
        for name, index in last_use.items():
            if name not in kept:
                done.setdefault(index, []).append(name)
        self.steps = [(step, done.get(index, [])) for index, step in enumerate(steps)]

    def run(self, inputs: Mapping[str, Tensor]) -> Values:
        """Outputs by name. Every input must be there with the declared dtype and fitting shape."""
        values: Values = {}
        for name, declared in self.inputs.items():
            values[name] = self._bound(declared, inputs[name])
        for step, done in self.steps:
            step(values)
            for name in done:
                del values[name]
        return {name: values[name] for name in self.outputs}

    def _bound(self, declared, tensor: Tensor) -> Tensor:
        if declared.dtype == self.trt.fp4:
            assert tensor.dtype == torch.uint8
            tensor = E2M1[torch.stack((tensor & 0xF, tensor >> 4), dim=-1).flatten(-2).long()]
        else:
            assert tensor.dtype == self.dtypes[declared.dtype], (declared.name, tensor.dtype, declared.dtype)
        shape = tuple(declared.shape)
        assert len(shape) == tensor.dim(), (declared.name, shape, tensor.shape)
        for wanted, found in zip(shape, tensor.shape, strict=True):
            assert wanted in (-1, found), (declared.name, shape, tuple(tensor.shape))
        return tensor

    def _compile(self, layer) -> Step:
        trt, kind = self.trt, layer.type
        name = str(kind).rsplit(".", 1)[-1]
        self.layer_types[name] = self.layer_types.get(name, 0) + 1
        ins = [layer.get_input(i).name if layer.get_input(i) is not None else None for i in range(layer.num_inputs)]
        outs = [layer.get_output(i).name for i in range(layer.num_outputs)]
        compute = getattr(self, "_" + name.lower())(layer, trt)
        declared = [layer.get_output(i).dtype for i in range(layer.num_outputs)]
        wanted = [self.dtypes.get(dtype) for dtype in declared]

        def step(values: Values) -> None:
            results = compute(*[None if i is None else values[i] for i in ins])
            for out, result, dtype in zip(
                outs, results if isinstance(results, list) else [results], wanted, strict=True
            ):
                # A network that is strongly typed says the dtype of every tensor: ours must be the same.
                assert result.dtype == dtype, (out, result.dtype, dtype)
                values[out] = result

        return step

    # One method per layer type: it reads the attributes now and returns the computation.

    def _constant(self, layer, trt):
        layer.__class__ = trt.IConstantLayer
        stored, shape = layer.weights, tuple(layer.shape)
        if isinstance(stored, np.ndarray):
            value = torch.from_numpy(np.array(stored)).reshape(shape)
        else:
            value = self.constants[layer.name]
            if value.dtype == torch.uint8:
                value = E2M1[torch.stack((value & 0xF, value >> 4), dim=-1).flatten(-2).long()]
            value = value.reshape(shape)
        return lambda: value

    def _cast(self, layer, trt):
        layer.__class__ = trt.ICastLayer
        dtype = self.dtypes[layer.to_type]
        return lambda x: x.to(dtype)

    def _elementwise(self, layer, trt):
        layer.__class__ = trt.IElementWiseLayer
        operation = str(layer.op).rsplit(".", 1)[-1]
        return {
            "SUM": torch.add,
            "PROD": torch.mul,
            "SUB": torch.sub,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "DIV": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
            "EQUAL": torch.eq,
            "LESS": torch.lt,
            "GREATER": torch.gt,
            "AND": torch.logical_and,
        }[operation]

    def _unary(self, layer, trt):
        layer.__class__ = trt.IUnaryLayer
        operation = str(layer.op).rsplit(".", 1)[-1]
        return {"SQRT": torch.sqrt, "RECIP": torch.reciprocal, "ABS": torch.abs}[operation]

    def _activation(self, layer, trt):
        layer.__class__ = trt.IActivationLayer
        # `type` of the base class is shadowed by the activation's own.
        operation = str(layer.type).rsplit(".", 1)[-1]
        return {"SIGMOID": torch.sigmoid, "TANH": torch.tanh}[operation]

    def _reduce(self, layer, trt):
        layer.__class__ = trt.IReduceLayer
        operation, mask, keep = str(layer.op).rsplit(".", 1)[-1], layer.axes, layer.keep_dims
        axes = [axis for axis in range(8) if mask >> axis & 1]
        if operation == "AVG":
            return lambda x: x.mean(axes, keepdim=keep)
        assert operation == "SUM"
        return lambda x: x.sum(axes, keepdim=keep, dtype=x.dtype)

    def _matrix_multiply(self, layer, trt):
        layer.__class__ = trt.IMatrixMultiplyLayer
        flip = [op == trt.MatrixOperation.TRANSPOSE for op in (layer.op0, layer.op1)]

        def compute(x: Tensor, y: Tensor) -> Tensor:
            assert x.dim() == y.dim()
            assert x.dtype == y.dtype
            if flip[1] and not flip[0] and y.shape[:-2].numel() == 1:
                return F.linear(x, y.reshape(y.shape[-2:]))
            return (x.mT if flip[0] else x) @ (y.mT if flip[1] else y)

        return compute

    def _shuffle(self, layer, trt):
        layer.__class__ = trt.IShuffleLayer
        first, dims, second = layer.first_transpose, layer.reshape_dims, layer.second_transpose
        rank = len(layer.get_input(0).shape)
        first = [first[i] for i in range(rank)]
        reshape = None if dims is None or len(dims) < 0 else list(dims)

        def compute(x: Tensor) -> Tensor:
            x = x.permute(first)
            if reshape is not None:
                x = x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(reshape)])
            return x.permute([second[i] for i in range(x.dim())])

        return compute

    def _concatenation(self, layer, trt):
        layer.__class__ = trt.IConcatenationLayer
        axis = layer.axis
        return lambda *parts: torch.cat(parts, axis)

    def _slice(self, layer, trt):
        layer.__class__ = trt.ISliceLayer
        # The size reads None where a tensor gives it.
        start, size, stride = list(layer.start), list(layer.shape or ()), list(layer.stride)
        fill = layer.mode == trt.SampleMode.FILL
        assert stride == [1] * len(stride)

        def compute(x: Tensor, *more: Tensor | None) -> Tensor:
            extent = [int(v) for v in more[1]] if len(more) > 1 and more[1] is not None else size
            for axis, (first, count) in enumerate(zip(start, extent, strict=True)):
                if first < 0:
                    assert fill
                    pad = list(x.shape)
                    pad[axis] = -first
                    value = more[3].to(x.dtype).expand(pad)
                    x = torch.cat((value, x.narrow(axis, 0, count + first)), axis)
                else:
                    assert first + count <= x.shape[axis], (layer.name, first, count, tuple(x.shape))
                    x = x.narrow(axis, first, count)
            return x

        return compute

    def _shape(self, layer, trt):
        return lambda x: torch.tensor(x.shape, dtype=torch.int64)

    def _gather(self, layer, trt):
        layer.__class__ = trt.IGatherLayer
        axis, together = layer.axis, layer.num_elementwise_dims
        assert layer.mode == trt.GatherMode.DEFAULT

        def compute(x: Tensor, indices: Tensor) -> Tensor:
            indices = indices.long()
            assert bool((indices >= 0).all())
            assert bool((indices < x.shape[axis]).all())
            if together == 0:
                flat = x.index_select(axis, indices.reshape(-1))
                return flat.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
            assert (together, axis) == (1, 1)
            return torch.stack([x[b].index_select(0, indices[b].reshape(-1)) for b in range(x.shape[0])]).reshape(
                *indices.shape, *x.shape[2:]
            )

        return compute

    def _select(self, layer, trt):
        return torch.where

    def _softmax(self, layer, trt):
        layer.__class__ = trt.ISoftMaxLayer
        (axis,) = [a for a in range(8) if layer.axes >> a & 1]
        return lambda x: torch.softmax(x, axis)

    def _cumulative(self, layer, trt):
        layer.__class__ = trt.ICumulativeLayer
        assert layer.op == trt.CumulativeOperation.SUM
        assert not layer.exclusive
        assert not layer.reverse
        return lambda x, axis: x.cumsum(int(axis))

    def _topk(self, layer, trt):
        layer.__class__ = trt.ITopKLayer
        (axis,) = [a for a in range(8) if layer.axes >> a & 1]
        k = layer.k
        assert layer.op == trt.TopKOperation.MAX

        def compute(x: Tensor) -> list[Tensor]:
            # Equal entries: lowest index first, the order that the torch dialect promises.
            values, order = torch.sort(x, dim=axis, descending=True, stable=True) if k > 1 else (None, None)
            if k == 1:
                best = x.argmax(axis, keepdim=True)
                return [x.gather(axis, best), best.int()]
            return [values.narrow(axis, 0, k), order.narrow(axis, 0, k).int()]

        return compute

    def _rotary_embedding(self, layer, trt):
        layer.__class__ = trt.IRotaryEmbeddingLayer
        assert not layer.interleaved
        rotary = layer.rotary_embedding_dim

        def compute(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
            assert x.dtype == cos.dtype == sin.dtype
            width = rotary or x.shape[-1]
            c, s = (table[positions.long()].unsqueeze(1) for table in (cos, sin))
            first, second = x[..., : width // 2], x[..., width // 2 : width]
            return torch.cat((first * c - second * s, second * c + first * s, x[..., width:]), -1)

        return compute

    def _kv_cache_update(self, layer, trt):
        layer.__class__ = trt.IKVCacheUpdateLayer
        assert layer.cache_mode == trt.KVCacheMode.LINEAR

        def compute(cache: Tensor, update: Tensor, starts: Tensor) -> Tensor:
            assert cache.dtype == update.dtype
            assert cache.shape[0] == update.shape[0] == starts.shape[0]
            for row, start in enumerate(starts.tolist()):
                # Writes beyond the row are dropped.
                count = max(0, min(update.shape[2], cache.shape[2] - start))
                cache[row, :, start : start + count] = update[row, :, :count]
            return cache

        return compute

    def _attention_input(self, layer, trt):
        layer.__class__ = trt.IAttentionBoundaryLayer
        attention = layer.attention
        key = attention.name
        causal = attention.causal_kind
        has_mask = attention.mask is not None

        def compute(q, k, v, mask=None, scale=None, q_lengths=None, kv_lengths=None):
            assert (mask is not None) == has_mask
            assert scale is None
            assert q_lengths is None
            assert q.dtype == k.dtype == v.dtype
            self.attention[key] = (q, k, v, mask, kv_lengths, causal)
            return [q, k, v][:layer_outputs]

        layer_outputs = layer.num_outputs
        assert layer_outputs <= 3
        return compute

    def _attention_output(self, layer, trt):
        layer.__class__ = trt.IAttentionBoundaryLayer
        key = layer.attention.name
        assert layer.attention.causal_kind == trt.CausalMaskKind.NONE

        def compute(*ignored) -> Tensor:
            q, k, v, mask, lengths, _ = self.attention.pop(key)
            visible = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
            if mask is not None:
                assert mask.dtype == torch.bool
                visible = visible & mask
            if lengths is not None:
                visible = visible & (torch.arange(k.shape[2]) < lengths[:, None].long())[:, None, None]
            # No scaling inside: the network multiplies the queries.
            return F.scaled_dot_product_attention(q, k, v, visible, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])

        return compute

    def _dequantize(self, layer, trt):
        layer.__class__ = trt.IDequantizeLayer
        axis, dtype = layer.axis, self.dtypes[layer.to_type]

        def compute(x: Tensor, scale: Tensor) -> Tensor:
            wide, factor = x.float(), scale.float()
            if factor.dim() == 1:
                shape = [1] * wide.dim()
                shape[axis] = -1
                factor = factor.reshape(shape)
            elif factor.dim():
                for dim in range(wide.dim()):
                    factor = factor.repeat_interleave(wide.shape[dim] // factor.shape[dim], dim)
            return (wide * factor).to(dtype)

        return compute

    def _dist_collective(self, layer, trt):
        name, label = layer.name, layer.metadata
        return lambda x: self.collective(name, label, x)

    def _identity(self, layer, trt):
        return lambda x: x


def _input_names(layer) -> list[str]:
    return [layer.get_input(i).name for i in range(layer.num_inputs) if layer.get_input(i) is not None]

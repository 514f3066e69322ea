"""Writing a TensorRT network: layers with names, errors at the layer that caused them, constants kept alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.tensorrt_library import ErrorLog, TensorRTLibrary

Layer = Any
NetworkTensor = Any
"""``ITensor`` of either TensorRT; their classes have no common base."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The dialect's tensor: one network tensor, or several that stand side by side along the last axis.

    A projection made of several matrices gives several parts; whoever wants only one of them then needs no
    concatenation and no slice.
    """

    parts: tuple[NetworkTensor, ...]

    @property
    def dtype(self) -> Any:
        """TensorRT dtype."""
        return self.parts[0].dtype


class NetworkWriter:
    """An ``INetworkDefinition`` being written.

    Args:
        library, log, network: TensorRT, its log, and the empty network.

    Attributes:
        constants: layer name → torch tensor of every constant: TensorRT holds only pointers until the build is done.
        near: name of the weight used last; it prefixes layer names, so that an error says where in the model it is.
    """

    def __init__(self, library: TensorRTLibrary, log: ErrorLog, network: Any) -> None:
        self.library = library
        self.trt = library.trt
        self.log = log
        self.network = network
        self.constants: dict[str, Tensor] = {}
        self.near = "network"
        self._names: dict[str, int] = {}
        self._scalars: dict[tuple[Any, ...], NetworkTensor] = {}
        self._shapes: dict[str, NetworkTensor] = {}

    def add(self, operation: str, layer: Layer, output: int = 0) -> NetworkTensor:
        """Name a new layer, check it, and give one of its outputs.

        Reading the shape makes TensorRT infer it now: otherwise a wrong shape or type surfaces only at build.

        Raises:
            BuildError: TensorRT refused the layer; the message has its place in the model and TensorRT's reason.
        """
        name = self._unique(f"{self.near}/{operation}")
        if layer is None:
            raise BuildError(f"{name}: TensorRT refused the layer: {self._reason()}")
        layer.name = name
        tensor = layer.get_output(output)
        try:
            dims = tuple(tensor.shape)
        except RuntimeError:
            raise BuildError(f"{name}: the inputs do not fit each other: {self._reason()}") from None
        self.log.check(name)
        if len(dims) > 8:
            raise BuildError(f"{name}: {len(dims)} dimensions, TensorRT has at most 8")
        return tensor

    def _reason(self) -> str:
        return "; ".join(self.log.take_errors()) or "no reason was logged"

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}.{count}"

    # Inputs, outputs, constants

    def dtype(self, dtype: torch.dtype) -> Any:
        """TensorRT's name of a torch dtype."""
        return _dtypes(self.trt)[dtype]

    def input(self, name: str, dtype: Any, shape: Sequence[int]) -> NetworkTensor:
        """A network input; -1 is a dynamic dimension."""
        tensor = self.network.add_input(name, dtype, tuple(shape))
        if tensor is None:
            raise BuildError(f"input {name}: TensorRT refused it: {self._reason()}")
        return tensor

    def output(self, name: str, tensor: NetworkTensor) -> None:
        """Make ``tensor`` a network output called ``name``."""
        tensor.name = name
        self.network.mark_output(tensor)
        self.log.check(f"output {name}")

    def constant(self, value: Tensor, dtype: Any = None, *, name: str = "constant") -> NetworkTensor:
        """``value`` as a constant; ``dtype`` overrides for types torch packs (fp4: two elements to a byte of uint8)."""
        trt = self.trt
        value = value.detach().contiguous()
        kind = self.dtype(value.dtype) if dtype is None else dtype
        shape, count = tuple(value.shape), value.numel()
        if kind == trt.fp4:
            shape, count = (*shape[:-1], shape[-1] * 2), count * 2
        layer = self.network.add_constant(shape, trt.Weights(kind, value.data_ptr(), count))
        tensor = self.add(name, layer)
        self.constants[layer.name] = value
        return tensor

    def scalar(self, value: float | int, like: NetworkTensor) -> NetworkTensor:
        """A constant of ``like``'s dtype that broadcasts to its rank."""
        key = (value, like.dtype, len(like.shape))
        if key not in self._scalars:
            kind = {v: k for k, v in _dtypes(self.trt).items()}[like.dtype]
            self._scalars[key] = self.constant(torch.full((1,) * len(like.shape), value, dtype=kind))
        return self._scalars[key]

    # Elementary layers

    def elementwise(self, operation: str, x: NetworkTensor, y: NetworkTensor) -> NetworkTensor:
        """``operation`` is a member of ``ElementWiseOperation``; equal ranks and dtypes, size 1 broadcasts."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.add(operation.lower(), self.network.add_elementwise(x, y, kind))

    def unary(self, operation: str, x: NetworkTensor) -> NetworkTensor:
        """``operation`` is a member of ``UnaryOperation``."""
        kind = getattr(self.trt.UnaryOperation, operation)
        return self.add(operation.lower(), self.network.add_unary(x, kind))

    def activation(self, operation: str, x: NetworkTensor) -> NetworkTensor:
        """``operation`` is a member of ``ActivationType``."""
        kind = getattr(self.trt.ActivationType, operation)
        return self.add(operation.lower(), self.network.add_activation(x, kind))

    def cast(self, x: NetworkTensor, dtype: Any) -> NetworkTensor:
        """``x`` as ``dtype``; itself where it has it already."""
        return x if x.dtype == dtype else self.add("cast", self.network.add_cast(x, dtype))

    def reshape(
        self, x: NetworkTensor, shape: Sequence[int], *, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> NetworkTensor:
        """Transpose by ``before``, reshape (0 copies a dimension, one -1 is inferred), transpose by ``after``."""
        layer = self.network.add_shuffle(x)
        if before:
            layer.first_transpose = tuple(before)
        if shape:
            layer.reshape_dims = tuple(shape)
        if after:
            layer.second_transpose = tuple(after)
        return self.add("reshape", layer)

    def concat(self, parts: Sequence[NetworkTensor], axis: int) -> NetworkTensor:
        """Parts joined along ``axis``."""
        if len(parts) == 1:
            return parts[0]
        layer = self.network.add_concatenation(list(parts))
        layer.axis = axis
        return self.add("concat", layer)

    def slice(self, x: NetworkTensor, axis: int, first: int, count: int) -> NetworkTensor:
        """Elements ``first .. first + count`` of a static ``axis``; other dimensions may be dynamic."""
        dims = list(x.shape)
        if first == 0 and dims[axis] == count:
            return x
        start = [0] * len(dims)
        start[axis] = first
        size = [max(dim, 0) for dim in dims]
        size[axis] = count
        extent = None
        if any(dim < 0 for dim in dims):
            less = torch.zeros(len(dims), dtype=torch.int64)
            less[axis] = dims[axis] - count
            extent = self.elementwise("SUB", self.shape_of(x), self.constant(less))
        layer = self.network.add_slice(x, tuple(start), tuple(size), (1,) * len(dims))
        if extent is not None:
            layer.set_input(2, extent)
        return self.add("slice", layer)

    def shift(self, x: NetworkTensor, axis: int, steps: int) -> NetworkTensor:
        """``x`` moved by ``steps`` towards higher indices of ``axis``, zeros moving in."""
        dims = list(x.shape)
        start = [0] * len(dims)
        start[axis] = -steps
        extent = self.shape_of(x) if any(dim < 0 for dim in dims) else None
        zero = self._zero(x)
        layer = self.network.add_slice(x, tuple(start), tuple(max(dim, 0) for dim in dims), (1,) * len(dims))
        layer.mode = self.trt.SampleMode.FILL
        if extent is not None:
            layer.set_input(2, extent)
        layer.set_input(4, zero)
        return self.add("shift", layer)

    def shape_of(self, x: NetworkTensor) -> NetworkTensor:
        """The run-time shape, int64."""
        if x.name not in self._shapes:
            self._shapes[x.name] = self.add("shape", self.network.add_shape(x))
        return self._shapes[x.name]

    def _zero(self, x: NetworkTensor) -> NetworkTensor:
        key = ("zero", x.dtype)
        if key not in self._scalars:
            kind = {v: k for k, v in _dtypes(self.trt).items()}[x.dtype]
            self._scalars[key] = self.constant(torch.zeros((), dtype=kind))
        return self._scalars[key]

    def reduce(self, operation: str, x: NetworkTensor) -> NetworkTensor:
        """Reduce the last axis, kept as size 1; ``operation`` is a member of ``ReduceOperation``."""
        kind = getattr(self.trt.ReduceOperation, operation)
        axes = 1 << (len(x.shape) - 1)
        return self.add(operation.lower(), self.network.add_reduce(x, kind, axes, True))

    def gather(
        self, x: NetworkTensor, indices: NetworkTensor, axis: int, *, per_request: bool = False
    ) -> NetworkTensor:
        """Elements of ``axis`` by ``indices``; ``per_request``: axis 0 of both runs together."""
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.DEFAULT)
        if layer is not None:
            layer.axis = axis
            layer.num_elementwise_dims = int(per_request)
        return self.add("gather", layer)

    def select(self, condition: NetworkTensor, yes: NetworkTensor, no: NetworkTensor) -> NetworkTensor:
        """``yes`` where ``condition`` (bool), else ``no``; broadcasts size 1."""
        return self.add("select", self.network.add_select(condition, yes, no))

    def matmul(self, x: NetworkTensor, y: NetworkTensor, *, transpose_y: bool = False) -> NetworkTensor:
        """Batched product over the last two axes, equal ranks."""
        none, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        layer = self.network.add_matrix_multiply(x, none, y, transpose if transpose_y else none)
        return self.add("matmul", layer)

    def top_k(self, x: NetworkTensor, k: int) -> tuple[NetworkTensor, NetworkTensor]:
        """The k largest of the last axis: values and int32 indices. The order of equal entries is not defined."""
        trt = self.trt
        axes = 1 << (len(x.shape) - 1)
        layer = self.network.add_topk(x, trt.TopKOperation.MAX, k, axes, trt.int32)
        return self.add("topk", layer), layer.get_output(1)


def element_bytes(library: TensorRTLibrary, dtype: Any) -> float:
    """Bytes of one element of a TensorRT dtype."""
    trt = library.trt
    if dtype == trt.fp4:
        return 0.5
    sizes = {kind: torch_dtype.itemsize for torch_dtype, kind in _dtypes(trt).items()}
    return float(sizes[dtype])


def _dtypes(trt: Any) -> dict[torch.dtype, Any]:
    return {
        torch.float32: trt.float32,
        torch.float16: trt.float16,
        torch.bfloat16: trt.bfloat16,
        torch.float8_e4m3fn: trt.fp8,
        torch.int8: trt.int8,
        torch.int32: trt.int32,
        torch.int64: trt.int64,
        torch.bool: trt.bool,
    }


def volume(shape: Sequence[int]) -> int:
    """Number of elements of a static shape."""
    return math.prod(shape)

"""Dense operations as TensorRT layers, shared by both lowerings: projections, norms, rotation, shape plumbing.

Activations have one or two leading dimensions (the lowering's business) and the features last; every operation here
looks only at the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops import tensorrt_select as select
from trtllm_dflash.ops.composed import ComposedOps
from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.tensorrt_network import Columns, NetworkTensor, NetworkWriter

AcrossRanks = Literal["sum", "gather"]


@dataclass(frozen=True)
class MatrixTensors:
    """One matrix as network tensors.

    Attributes:
        weight: ``[1.., out, in]``, plain or quantised.
        scale: per output channel ``[out]`` (fp8, int8), or per block of 16 inputs ``[1.., out, in / 16]`` (nvfp4).
        scale_2: nvfp4's global scale. bias: ``[out]``.
    """

    weight: NetworkTensor
    scale: NetworkTensor | None = None
    scale_2: NetworkTensor | None = None
    bias: NetworkTensor | None = None


@dataclass(frozen=True)
class Matrix:
    """One matrix of a projection.

    Attributes:
        name: the weight's name in the checkpoint.
        load: makes its network tensors, once; a weight that no operation uses never enters the network.
        across_ranks: what makes one rank's result whole: ``sum`` (split by inputs), ``gather`` (split by outputs).
        out_features: rows after gathering that are real; padding beyond is cut.
    """

    name: str
    load: Callable[[], MatrixTensors]
    across_ranks: AcrossRanks | None = None
    out_features: int = 0


@dataclass(frozen=True)
class Vector:
    """A weight that is not projected with (norm, convolution base, codebook), and its name; ``load`` as above."""

    name: str
    load: Callable[[], NetworkTensor]

    @property
    def weight(self) -> NetworkTensor:
        """The network tensor, in the tensor's own shape."""
        return self.load()


@dataclass(frozen=True)
class Table(Vector):
    """An embedding table ``[rows, H]``; with several ranks each holds consecutive rows."""

    first_row: int = 0
    split: bool = False


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines, each ``[positions, rotary_dim / 2]`` float32."""

    cos: NetworkTensor
    sin: NetworkTensor


@dataclass(frozen=True)
class RotaryAt:
    """The rotation of one pass: the table and the positions of its rows."""

    table: RotaryTable
    positions: NetworkTensor


class TensorRTDense(ComposedOps[Columns]):
    """The part of :class:`trtllm_dflash.ops.interface.Ops` that no lowering changes.

    Args:
        writer: the network being written. dtype: TensorRT dtype of projections and norms. ranks: tensor-parallel size.

    Attributes:
        updated: cache input name → its tensor after this pass's writes (a network output that aliases the input).
    """

    def __init__(self, writer: NetworkWriter, dtype: Any, *, ranks: int = 1) -> None:
        self.w = writer
        self.compute_dtype = dtype
        self.ranks = ranks
        self.updated: dict[str, NetworkTensor] = {}

    def finish_writes(self) -> None:
        """Emit cache writes that the dialect put off; there are none unless it says otherwise."""

    def whole(self, x: Columns) -> NetworkTensor:
        """``x`` as one network tensor."""
        return self.w.concat(x.parts, len(x.parts[0].shape) - 1)

    def one(self, tensor: NetworkTensor) -> Columns:
        """A network tensor as the dialect's."""
        return Columns((tensor,))

    def embedding(self, table: Table, ids: Columns) -> Columns:
        w = self.w
        w.near = table.name
        rows, weight = self.whole(ids), table.weight
        if not table.split:
            return self.one(w.gather(weight, rows, 0))
        # A row that another rank holds contributes zero to the sum over ranks.
        count = weight.shape[0]
        local = w.elementwise("SUB", rows, w.scalar(table.first_row, rows))
        clamped = w.elementwise("MAX", w.elementwise("MIN", local, w.scalar(count - 1, local)), w.scalar(0, local))
        inside = w.elementwise("EQUAL", local, clamped)
        gathered = w.gather(weight, clamped, 0)
        mask = w.reshape(w.cast(inside, gathered.dtype), [*([0] * len(rows.shape)), 1])
        return self.one(self._sum_over_ranks(w.elementwise("PROD", gathered, mask)))

    def linear(self, x: Columns, projection: Linear[Columns]) -> Columns:
        whole = self.whole(x)
        matrices: Sequence[Matrix] = projection.weight
        return Columns(tuple(self._project(whole, matrix) for matrix in matrices))

    def _project(self, x: NetworkTensor, matrix: Matrix) -> NetworkTensor:
        w = self.w
        w.near = matrix.name
        tensors = matrix.load()
        y = w.matmul(x, self._dequantized(tensors), transpose_y=True)
        if matrix.across_ranks == "sum":
            y = self._sum_over_ranks(y)
        elif matrix.across_ranks == "gather":
            y = self._gather_over_ranks(y, matrix.out_features)
        if tensors.bias is not None:
            y = w.elementwise("SUM", y, self._as_rank(tensors.bias, y))
        return y

    def _dequantized(self, matrix: MatrixTensors) -> NetworkTensor:
        w, network = self.w, self.w.network
        if matrix.scale is None:
            return matrix.weight
        scale = matrix.scale
        if matrix.scale_2 is not None:
            scale = w.add("block_scales", network.add_dequantize(scale, matrix.scale_2, self.compute_dtype))
            return w.add("dequantize", network.add_dequantize(matrix.weight, scale, self.compute_dtype))
        layer = network.add_dequantize(matrix.weight, scale, self.compute_dtype)
        if layer is not None:
            layer.axis = len(matrix.weight.shape) - 2
        return w.add("dequantize", layer)

    def rms_norm(self, x: Columns, weight: Vector, eps: float) -> Columns:
        w, trt = self.w, self.w.trt
        w.near = weight.name
        wide = w.cast(self.whole(x), trt.float32)
        mean = w.reduce("AVG", w.elementwise("PROD", wide, wide))
        rate = w.unary("RECIP", w.unary("SQRT", w.elementwise("SUM", mean, w.scalar(eps, mean))))
        # The weight multiplies before the one rounding: TensorRT-RTX 1.7 fails on chains that round in between
        # ("uses before defs") when a query-key norm meets 9 to 16 rows.
        dtype = weight.weight.dtype
        normed = w.elementwise("PROD", wide, rate)
        scaled = w.elementwise("PROD", normed, self._as_rank(w.cast(weight.weight, trt.float32), normed))
        return self.one(w.cast(scaled, dtype))

    def add(self, x: Columns, y: Columns) -> Columns:
        left, right = self.whole(x), self.whole(y)
        wide = self.w.trt.float32
        if wide in (left.dtype, right.dtype):
            left, right = self.w.cast(left, wide), self.w.cast(right, wide)
        return self.one(self.w.elementwise("SUM", left, right))

    def scale(self, x: Columns, factor: float) -> Columns:
        whole = self.whole(x)
        return self.one(self.w.elementwise("PROD", whole, self.w.scalar(factor, whole)))

    def softcap(self, x: Columns, cap: float) -> Columns:
        w, whole = self.w, self.whole(x)
        squashed = w.activation("TANH", w.elementwise("DIV", whole, w.scalar(cap, whole)))
        return self.one(w.elementwise("PROD", squashed, w.scalar(cap, whole)))

    def swiglu(self, gate_up: Columns) -> Columns:
        w = self.w
        if len(gate_up.parts) == 2:
            gate, up = gate_up.parts
        else:
            whole = self.whole(gate_up)
            half = whole.shape[-1] // 2
            gate, up = (w.slice(whole, len(whole.shape) - 1, first, half) for first in (0, half))
        return self.one(w.elementwise("PROD", w.elementwise("PROD", gate, w.activation("SIGMOID", gate)), up))

    def concat_columns(self, parts: list[Columns]) -> Columns:
        return Columns(tuple(part for columns in parts for part in columns.parts))

    def columns(self, x: Columns, first: int, count: int) -> Columns:
        return self.one(self.take_columns(x, first, count))

    def take_columns(self, x: Columns, first: int, count: int) -> NetworkTensor:
        """Columns ``first .. first + count``, which lie in one part where they can."""
        start = 0
        for part in x.parts:
            width = part.shape[-1]
            if start <= first and first + count <= start + width:
                return self.w.slice(part, len(part.shape) - 1, first - start, count)
            start += width
        whole = self.whole(x)
        return self.w.slice(whole, len(whole.shape) - 1, first, count)

    def to_float32(self, x: Columns) -> Columns:
        return Columns(tuple(self.w.cast(part, self.w.trt.float32) for part in x.parts))

    def head_range(self, x: Columns, first: int, count: int) -> Columns:
        # Heads are the second axis in both lowerings.
        return self.one(self.w.slice(self.whole(x), 1, first, count))

    def rotary_rows(self, cos_sin: RotaryTable, positions: Columns) -> RotaryAt:
        return RotaryAt(cos_sin, self.whole(positions))

    def rotate(self, x: NetworkTensor, rows: RotaryAt) -> NetworkTensor:
        """Rotate ``x [B, heads, S, head_dim]`` at positions ``[B, S]``, computed in float32."""
        w, trt = self.w, self.w.trt
        rotary_dim = 2 * rows.table.cos.shape[-1]
        layer = w.network.add_rotary_embedding(
            w.cast(x, trt.float32),
            rows.table.cos,
            rows.table.sin,
            False,
            0 if rotary_dim == x.shape[-1] else rotary_dim,
        )
        if layer is None:
            raise BuildError(f"{w.near}: TensorRT refused the rotary embedding of {rotary_dim} dimensions")
        layer.set_input(3, rows.positions)
        return w.cast(w.add("rotary", layer), x.dtype)

    def top_k(self, x: Columns, k: int) -> tuple[Columns, Columns]:
        self.w.near = "candidates"
        values, indices = self.w.top_k(self.whole(x), k)
        return self.one(values), self.one(indices)

    def independent_draw(
        self, unary: Columns, temperatures: Columns, uniforms: Columns, candidates: Columns
    ) -> tuple[Columns, Columns]:
        tensors = (self.whole(x) for x in (unary, temperatures, uniforms, candidates))
        tokens, q_rows = select.independent_draw(self.w, *tensors)
        return self.one(tokens), self.one(q_rows)

    def add_offsets(self, ids: Columns, offsets: Vector) -> Columns:
        w, rows = self.w, self.whole(ids)
        w.near = offsets.name
        found = w.cast(w.gather(offsets.weight, rows, 0), rows.dtype)
        return self.one(w.elementwise("SUM", rows, found))

    def block_ids(self, anchors: Columns, mask_token_id: int, block_size: int) -> Columns:
        w = self.w
        w.near = "block"
        is_anchor = torch.zeros(1, block_size, dtype=torch.int32)
        is_anchor[0, 0] = 1
        column = w.reshape(self.whole(anchors), (0, 1))
        first = w.elementwise("PROD", column, w.constant(is_anchor))
        return self.one(w.elementwise("SUM", first, w.constant((1 - is_anchor) * mask_token_id)))

    def block_positions(self, context_lengths: Columns, block_size: int) -> Columns:
        w = self.w
        offsets = w.constant(torch.arange(block_size, dtype=torch.int32).view(1, -1))
        return self.one(w.elementwise("SUM", w.reshape(self.whole(context_lengths), (0, 1)), offsets))

    def _as_rank(self, vector: NetworkTensor, like: NetworkTensor) -> NetworkTensor:
        """``[C]`` as ``[1, .., C]`` of ``like``'s rank."""
        return self.w.reshape(vector, [1] * (len(like.shape) - 1) + [vector.shape[0]])

    def _sum_over_ranks(self, x: NetworkTensor) -> NetworkTensor:
        trt = self.w.trt
        return self._collective("sum_over_ranks", x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM)

    def _gather_over_ranks(self, x: NetworkTensor, wanted: int) -> NetworkTensor:
        """Columns of every rank side by side, cut to ``wanted``. The collective joins along the first axis."""
        w, rank = self.w, len(x.shape)
        columns_first = w.reshape(x, (), before=(rank - 1, *range(rank - 1)))
        trt = w.trt
        joined = self._collective(
            "gather_over_ranks", columns_first, trt.CollectiveOperation.ALL_GATHER, trt.ReduceOperation.NONE
        )
        columns_last = w.reshape(joined, (), before=(*range(1, rank), 0))
        return w.slice(columns_last, rank - 1, 0, wanted)

    def _collective(self, label: str, x: NetworkTensor, operation: Any, reduction: Any) -> NetworkTensor:
        network = self.w.network
        layer = network.add_dist_collective(x, operation, reduction, -1, None)
        if layer is None:
            raise BuildError(
                f"{self.w.near}: TensorRT refused a {label} over {self.ranks} ranks",
                hint="tensor parallelism needs TensorRT with IDistCollectiveLayer (11.0) and NCCL",
            )
        layer.num_ranks = self.ranks
        # What a collective does cannot be read back from the layer; the record serves tests and `inspect`.
        layer.metadata = label
        return self.w.add(label, layer)

"""Weights of a TensorRT network: network inputs bound at load time, or constants inside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from trtllm_dflash.checkpoint.quantize import NVFP4_BLOCK, SCALE, SCALE_2, WEIGHT
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.engine.plan_facts import WeightBinding, WeightsMode
from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.interface import Linear
from trtllm_dflash.ops.tensorrt_dense import AcrossRanks, Matrix, MatrixTensors, Table, Vector
from trtllm_dflash.ops.tensorrt_network import Columns, NetworkTensor, NetworkWriter, element_bytes, volume

_EMBEDDING, _HEAD = "transformer.vocab_embedding", "lm_head"
_SPLIT_BY_INPUTS = (".attention.dense", ".mlp.proj")
_QUANTISED: dict[torch.dtype, QuantAlgo] = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "nvfp4"}


class TensorRTWeightSource:
    """``WeightSource`` over one model's rank file.

    Args:
        writer: the network. model: whose weights. tensors: name → tensor of this rank, read on access.
        dtype: compute dtype. mode: ``external`` makes inputs, ``embedded`` constants.
        row_rank: leading dimensions of activations.
        rank, ranks: tensor parallelism. vocab_size: real rows of embedding and head.

    Attributes:
        bindings: what is to be bound to the inputs made so far. weight_bytes: bytes of the weights used so far.
    """

    def __init__(
        self,
        writer: NetworkWriter,
        model: Literal["target", "drafter"],
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        mode: WeightsMode,
        row_rank: int,
        rank: int,
        ranks: int,
        vocab_size: int,
    ) -> None:
        self._w = writer
        self._model = model
        self._tensors = tensors
        self._dtype = dtype
        self._mode = mode
        self._row_rank = row_rank
        self._rank = rank
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._made: dict[str, NetworkTensor] = {}
        self._counted: set[tuple[object, ...]] = set()
        self.bindings: list[WeightBinding] = []
        self.weight_bytes = 0

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Any:
        """A vector or codebook, the embedding table, or (three-dimensional) a tuple of matrices."""
        shape = self._read(name).shape
        if len(shape) == 3:
            return tuple(
                Vector(f"{name}[{index}]", lambda index=index: self._place(name, index=index))  # type: ignore[misc]
                for index in range(shape[0])
            )
        if name.startswith(_EMBEDDING):
            return Table(name, lambda: self._place(name), self._rank * shape[0], split=self._ranks > 1)
        return Vector(name, lambda: self._place(name))

    def linear(self, names: list[str], *, bias: bool = False, rows: tuple[int, int] | None = None) -> Linear[Columns]:
        return Linear(tuple(self._matrix(name, bias, rows) for name in names))

    def _matrix(self, name: str, bias: bool, rows: tuple[int, int] | None) -> Matrix:
        algo = stored_algorithm(self._tensors, name)

        def load() -> MatrixTensors:
            return MatrixTensors(
                weight=self._place(f"{name}.{WEIGHT}", rows=rows, matrix=True, algo=algo),
                scale=None if algo == "none" else self._place(f"{name}.{SCALE}", rows=rows, matrix=algo == "nvfp4"),
                scale_2=self._place(f"{name}.{SCALE_2}") if algo == "nvfp4" else None,
                bias=self._place(f"{name}.bias", rows=rows) if bias else None,
            )

        return Matrix(name, load, self._across_ranks(name), self._vocab_size)

    def _across_ranks(self, name: str) -> AcrossRanks | None:
        if self._ranks == 1:
            return None
        if name.endswith(_SPLIT_BY_INPUTS):
            return "sum"
        # A drafter's own reduced head is whole on every rank.
        return "gather" if name in (_HEAD, _EMBEDDING) and self._model == "target" else None

    def _read(self, name: str) -> Tensor:
        try:
            tensor = self._tensors[name]
        except KeyError:
            raise BuildError(
                f"the {self._model}'s rank file has no tensor '{name}'", hint="convert the checkpoint again"
            ) from None
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.dtype != self._dtype:
            is_scale = name.endswith((SCALE, SCALE_2))
            if not is_scale:
                raise BuildError(
                    f"tensor '{name}' is {tensor.dtype}, expected the compute dtype {self._dtype}",
                    hint="convert the checkpoint with --dtype",
                )
        return tensor

    def _place(
        self,
        name: str,
        *,
        rows: tuple[int, int] | None = None,
        index: int | None = None,
        matrix: bool = False,
        algo: QuantAlgo = "none",
    ) -> NetworkTensor:
        """Tensor ``name``, or its entry ``index``, or its ``rows``, as an input or a constant."""
        key, tensor = f"{self._model}.{name}", self._read(name)
        if rows is not None and tensor.dim() > 0:
            tensor = tensor[rows[0] : rows[1]]
            key += f"[{rows[0]}:{rows[1]}]"
        if index is not None:
            tensor = tensor[index]
            key += f"[{index}]"
        if matrix:
            # The same table serves look-ups and products in different shapes.
            tensor = tensor.reshape(*([1] * (self._row_rank - 1)), *tensor.shape)
            key += "" if name.endswith(f".{SCALE}") else ".matrix"
        if key in self._made:
            return self._made[key]
        dtype = self._w.trt.fp4 if algo == "nvfp4" else self._w.dtype(tensor.dtype)
        shape = tuple(tensor.shape)
        if algo == "nvfp4":
            shape = (*shape[:-1], 2 * shape[-1])
            if shape[-1] % NVFP4_BLOCK:
                raise BuildError(f"tensor '{name}': {shape[-1]} inputs, expected a multiple of {NVFP4_BLOCK} for nvfp4")
        if (name, rows, index) not in self._counted:
            self._counted.add((name, rows, index))
            self.weight_bytes += int(volume(shape) * element_bytes(self._w.library, dtype))
        table = self._made.get(key.removesuffix(".matrix"))
        if self._mode == "embedded" and table is not None:
            # A tied head is the table in another shape, not a second constant.
            made = self._w.reshape(table, shape)
        elif self._mode == "embedded":
            made = self._w.constant(tensor, dtype, name=key)
        else:
            made = self._w.input(key, dtype, shape)
            self.bindings.append(WeightBinding(key, self._model, name, rows, index, dtype_name(dtype), shape))
        self._made[key] = made
        return made


def stored_algorithm(tensors: Mapping[str, Tensor], name: str) -> QuantAlgo:
    """How the projection ``name`` is stored, which its tensors say: target and drafter may differ.

    Raises:
        BuildError: it has scales, and a weight of a dtype that no algorithm has.
    """
    if f"{name}.{SCALE}" not in tensors:
        return "none"
    dtype = tensors[f"{name}.{WEIGHT}"].dtype
    if dtype not in _QUANTISED:
        raise BuildError(
            f"tensor '{name}.{WEIGHT}' has scales and is {dtype}, expected one of {', '.join(map(str, _QUANTISED))}",
            hint="convert the checkpoint again",
        )
    return _QUANTISED[dtype]


def dtype_name(dtype: Any) -> str:
    """TensorRT dtype → lower-case name (``bf16``, ``float``, ``fp8``, …)."""
    return str(dtype).rsplit(".", 1)[-1].lower()

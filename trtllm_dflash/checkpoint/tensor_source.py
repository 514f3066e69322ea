"""Reading the safetensors files of a Hugging Face checkpoint one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trtllm_dflash.config.json_reader import read_json
from trtllm_dflash.errors import CheckpointError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_BLOCK_ELEMENTS = 16 << 20
_INTEGER_DTYPES = ("I64", "I32", "I16", "U8", "I8", "BOOL")


@dataclass(frozen=True)
class SourceTensor:
    """Where a tensor lies: its file, safetensors dtype name and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorSource:
    """The tensors of one checkpoint directory, by name.

    Attributes:
        directory: the checkpoint directory.
        tensors: every tensor of every file.
    """

    def __init__(self, directory: Path, tensors: dict[str, SourceTensor]) -> None:
        self.directory = directory
        self.tensors = tensors

    def require(self, name: str, shape: tuple[int, ...], *, extra_rows: bool = False) -> SourceTensor:
        """The tensor ``name``, checked to have ``shape``.

        Args:
            name: tensor name. shape: expected shape.
            extra_rows: the tensor may have more rows than that (padded vocabularies).

        Raises:
            CheckpointError: missing or of another shape; names tensor, file, found and expected.
        """
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self.directory}: tensor '{name}' is missing, expected shape {list(shape)}",
                hint="the weights do not belong to this config.json, or the download is incomplete",
            )
        padded = extra_rows and len(found.shape) == len(shape) and found.shape[0] > shape[0]
        if found.shape != shape and not (padded and found.shape[1:] == shape[1:]):
            raise CheckpointError(
                f"{found.file}: tensor '{name}': found shape {list(found.shape)}, expected {list(shape)}",
                hint="the weights do not belong to this config.json",
            )
        return found

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the leading rows of a float tensor into ``out`` (same trailing shape), converting to its dtype.

        Raises:
            CheckpointError: not a float tensor (quantised already), not finite, or too large for ``out``'s dtype.
        """
        place = self.tensors[name]
        if place.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"{place.file}: tensor '{name}': found dtype {place.dtype}, expected one of {', '.join(_FLOAT_DTYPES)}",
                hint="convert the original unquantised checkpoint and pass --quantization",
            )
        step = max(1, _BLOCK_ELEMENTS * out.shape[0] // max(1, out.numel()))
        for first in range(0, out.shape[0], step):
            block = out[first : first + step]
            with _open(place.file) as file:
                block.copy_(file.get_slice(name)[first : first + len(block)])
            if not bool(torch.isfinite(block).all()):
                raise CheckpointError(
                    f"{place.file}: tensor '{name}': found values that are not finite as {str(out.dtype)[6:]}",
                    hint="try --dtype float32; if that fails too, the checkpoint is damaged",
                )

    def read_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows ``first .. first + count`` of a tensor, as stored."""
        with _open(self.tensors[name].file) as file:
            rows: torch.Tensor = file.get_slice(name)[first : first + count]
            return rows

    def read_integers(self, name: str) -> torch.Tensor:
        """An integer or boolean tensor as int64.

        Raises:
            CheckpointError: missing or of another dtype.
        """
        place = self.tensors.get(name)
        if place is None or place.dtype not in _INTEGER_DTYPES:
            found = "nothing" if place is None else f"dtype {place.dtype}"
            raise CheckpointError(
                f"{self.directory if place is None else place.file}: tensor '{name}': found {found}, "
                "expected an integer tensor"
            )
        with _open(place.file) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.to(torch.int64, copy=True)


def open_tensor_source(directory: Path) -> TensorSource:
    """List the tensors of a checkpoint directory: a sharded index or single files.

    Raises:
        CheckpointError: no safetensors, only pickles, a shard missing or damaged, a tensor in two files.
    """
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).child("weight_map")
        files = sorted({weight_map.string(name) for name in weight_map})
    elif (directory / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise _no_safetensors(directory)
    tensors: dict[str, SourceTensor] = {}
    for name in files:
        for tensor, place in _list_file(directory / name).items():
            if tensor in tensors:
                raise CheckpointError(f"{place.file}: tensor '{tensor}' is also in {tensors[tensor].file}")
            tensors[tensor] = place
    if index.is_file():
        for tensor in weight_map:
            if tensor not in tensors:
                raise CheckpointError(f"{index}: lists tensor '{tensor}', which no file has")
    return TensorSource(directory, tensors)


def check_same_weights(source: TensorSource, name: str, other: TensorSource, other_name: str, *, rows: int) -> None:
    """Check that ``name`` repeats ``other_name`` of another checkpoint, rounded to its own dtype.

    Args:
        source, name: the copy. other, other_name: the original. rows: leading rows to compare.

    Raises:
        CheckpointError: the shapes or any value differ.
    """
    copy, original = source.tensors[name], other.tensors[other_name]
    message = (
        f"{copy.file}: tensor '{name}': found other values than the target's '{other_name}' ({original.file}); "
        "drafters with an embedding or head of their own are not supported"
    )
    hint = "use the target that the drafter was trained for"
    if copy.shape[1:] != original.shape[1:] or min(copy.shape[0], original.shape[0]) < rows:
        raise CheckpointError(message, hint=hint)
    step = max(1, _BLOCK_ELEMENTS // max(1, copy.shape[1]))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        block = source.read_rows(name, first, count)
        if not torch.equal(block, other.read_rows(other_name, first, count).to(block.dtype)):
            raise CheckpointError(message, hint=hint)


def _list_file(file: Path) -> dict[str, SourceTensor]:
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        return {name: SourceTensor(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def _open(file: Path) -> safe_open:
    # Opened anew for every tensor: pages of a long-lived map stay in resident memory until the whole model is in it.
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file", hint="the download is incomplete") from None
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(
            f"{file}: not a complete safetensors file: {problem}", hint="the download is incomplete or damaged"
        ) from None


def _no_safetensors(directory: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{directory}: found only pickled weights ({pickles[0]}), expected {_SINGLE} or {_INDEX}; "
            "pickles can run code when opened and are never read",
            hint="save the model with transformers' save_pretrained(..., safe_serialization=True)",
        )
    return CheckpointError(f"{directory}: no weights, expected {_SINGLE} or {_INDEX}")

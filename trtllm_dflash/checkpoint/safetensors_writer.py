"""Writing a safetensors file piece by piece: the header first, then each tensor at its place.

The safetensors library writes from a dictionary that holds every tensor at once; a checkpoint larger than the host's
memory cannot be written that way.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.manifest import FileRecord, hash_file

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.bool: "BOOL",
}
"""Safetensors' name of each dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """One safetensors file under construction.

    Args:
        path: the file, which is created.
        specs: every tensor the file will hold.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        # Wide dtypes first keeps every tensor aligned to its own size, which readers that map the file rely on.
        ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[TensorSpec, int]] = {}
        offset = 0
        for spec in ordered:
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.bytes],
            }
            self._places[spec.name] = (spec, offset)
            offset += spec.bytes
        if len(self._places) != len(ordered):
            raise ValueError(f"{path}: a tensor name is given twice")
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path = path
        self._data_start = 8 + len(text)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._write_at(memoryview(struct.pack("<Q", len(text)) + text), 0)
        self._end = self._data_start + offset

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; each exactly once, in any order.

        Args:
            name: a name of the specs. tensor: CPU tensor of that spec's dtype and shape.
        """
        spec, offset = self._places.pop(name)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, planned {spec.dtype} {spec.shape}")
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write_at(raw.data, self._data_start + offset)

    @property
    def file_bytes(self) -> int:
        """Size of the finished file."""
        return self._end

    def close(self, progress: Callable[[int], None] | None = None) -> FileRecord:
        """Finish the file and record it. Every tensor must have been written.

        Args:
            progress: called with the bytes hashed so far.
        """
        os.close(self._descriptor)
        if self._places:
            raise ValueError(f"{self.path}: never written: {', '.join(sorted(self._places))}")
        record = hash_file(self.path, progress)
        assert record.bytes == self._end
        return record

    def abort(self) -> None:
        """Give the file up after an error; the caller removes it."""
        os.close(self._descriptor)

    def _write_at(self, data: memoryview, position: int) -> None:
        while data:
            # Linux writes at most 2 GiB in one call.
            written = os.pwrite(self._descriptor, data, position)
            data, position = data[written:], position + written

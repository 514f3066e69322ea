"""Reading a rank file without the safetensors library: shapes alone, or tensors that share the file's pages.

Plans are made in a worker whose memory layout must be the same in every run (see ``plan_worker``); the safetensors
library keeps tensors in a randomly seeded map, which makes it different. The format is a little-endian 64-bit length,
a JSON header of that length (``dtype``, ``shape``, ``data_offsets`` per name) and the data.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from trtllm_dflash.errors import CheckpointError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_LONGEST_HEADER = 100_000_000
_MADV_DONTNEED = 4


class RankFile(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file by name.

    Args:
        file: the file. shapes_only: give meta tensors, which have no data; otherwise tensors share the file's pages
            copy on write.

    Raises:
        CheckpointError: the file is missing or damaged, or has a dtype that no rank file has.
    """

    def __init__(self, file: Path, *, shapes_only: bool) -> None:
        self.file = file
        self._shapes_only = shapes_only
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if not 0 < length <= _LONGEST_HEADER:
                    raise ValueError(f"header of {length} bytes")
                header = json.loads(opened.read(length))
            entries = sorted((name, entry) for name, entry in header.items() if name != "__metadata__")
            self._entries = {
                name: (_DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"][0] + 8 + length)
                for name, entry in entries
            }
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise CheckpointError(f"{file}: cannot be read: {problem!r}", hint="convert again with --force") from None
        self._storage = None if shapes_only else torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, offset = self._entries[name]
        if self._storage is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        size = math.prod(shape) * dtype.itemsize
        flat = torch.empty(0, dtype=torch.uint8).set_(self._storage, offset, (size,))  # type: ignore[call-overload]
        # A file written by others may not align its tensors; ours always do.
        flat = flat.clone() if offset % dtype.itemsize else flat
        tensor: torch.Tensor = flat.view(dtype).view(shape)
        return tensor

    def release_pages(self) -> None:
        """Give the file's pages that were read back to the system; whoever reads them again finds them again.

        They count as this process's memory although the system can drop them at any time. Tensors stay valid, but for
        what was written into them, which nobody does.
        """
        if self._storage is not None:
            with suppress(AttributeError, OSError):
                libc = ctypes.CDLL(None)
                libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
                libc.madvise(self._storage.data_ptr(), self._storage.nbytes(), _MADV_DONTNEED)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

"""How long a launch takes that only reads: the floor under attention at small caches.

The copy that the roofline is made of writes half of its bytes into the L2 and gets out of the way; a kernel that must
have read all of them first starts, fills its pipeline and drains it within the measured time. ``read_floor.cu`` does
that and nothing else, with the copy engine and the launch attributes of the attention kernel. nvcc compiles it here.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

MEGABYTES = (64, 128)


def measure(time_us: Callable[[Sequence[Callable[[], object]]], float]) -> dict[str, float]:
    """Microseconds per read of 64 and 128 MiB, over buffers that rotate beyond the L2 cache.

    Args:
        time_us: median microseconds of one of the calls it is given, ``gpu_timing.time_us``.

    Returns:
        ``read_floor_us_{64,128}mb``, the faster of pieces in turn and one range per multiprocessor; empty without nvcc.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("read floor: skipped, nvcc is not on the PATH", flush=True)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read_floor.so"
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}"
        source = Path(__file__).with_name("read_floor.cu")
        subprocess.run(
            [
                nvcc,
                "-O3",
                "-std=c++17",
                f"-arch={architecture}",
                "-shared",
                "-Xcompiler=-fPIC",
                str(source),
                "-o",
                str(path),
            ],
            check=True,
        )
        library = ctypes.CDLL(str(path))
    return {f"read_floor_us_{size}mb": round(_read_us(library, size << 20, time_us), 2) for size in MEGABYTES}


def _read_us(
    library: ctypes.CDLL, size_bytes: int, time_us: Callable[[Sequence[Callable[[], object]]], float]
) -> float:
    buffers = [torch.randn(size_bytes // 4, device="cuda") for _ in range(max(2, (1 << 30) // size_bytes))]
    out = torch.empty(torch.cuda.get_device_properties(0).multi_processor_count, device="cuda")

    def read(buffer: Tensor, interleaved: bool) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = library.read_floor(
            ctypes.c_void_p(buffer.data_ptr()),
            ctypes.c_int64(size_bytes),
            int(interleaved),
            ctypes.c_void_p(out.data_ptr()),
            stream,
        )
        if status != 0:
            raise RuntimeError(f"read_floor.cu: the launch failed with cudaError {status}")

    ways = [[lambda b=b, way=way: read(b, way) for b in buffers] for way in (False, True)]
    return min(time_us(calls) for calls in ways)

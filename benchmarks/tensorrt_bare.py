"""TensorRT-RTX alone, without torch and without our code: what it takes to put constants into a plan.

``python benchmarks/tensorrt_bare.py LAYERS HIDDEN INNER VOCAB`` builds a chain of bfloat16 products whose matrices are
mapped from a file, and prints one JSON line: bytes of constants, peak resident memory, and the memory before it began.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tensorrt_rtx as trt


def main(layers: int, hidden: int, inner: int, vocab: int) -> None:
    shapes = {"table": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"q{layer}": (hidden, hidden), f"o{layer}": (hidden, hidden), f"down{layer}": (hidden, inner)}
        shapes |= {f"gate{layer}": (inner, hidden), f"up{layer}": (inner, hidden)}
    count = sum(rows * columns for rows, columns in shapes.values())
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constants"
        with file.open("wb") as out:
            for rows, columns in shapes.values():
                # Positive bfloat16 numbers below one.
                out.write(generator.integers(0, 0x3F80, rows * columns, dtype=np.uint16).tobytes())
        values = np.memmap(file, dtype=np.uint16, mode="r")
        before = resident_mb()
        peak, done = [before], threading.Event()
        watcher = threading.Thread(target=_watch, args=(peak, done))
        watcher.start()
        plan_bytes = _build(shapes, values)
        done.set()
        watcher.join()
    facts = {"constants_mb": 2 * count / 1e6, "before_mb": before, "peak_mb": peak[0], "plan_mb": plan_bytes / 1e6}
    print(json.dumps(facts))


def _build(shapes: dict[str, tuple[int, int]], values: np.memmap) -> int:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    none, transpose, add = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE, trt.ElementWiseOperation.SUM
    hidden = shapes["table"][1]
    constants, first = {}, 0
    for name, (rows, columns) in shapes.items():
        part = values[first : first + rows * columns]
        first += rows * columns
        dims = (rows, columns) if name == "table" else (1, rows, columns)
        weights = trt.Weights(trt.bfloat16, part.ctypes.data, part.size)
        constants[name] = network.add_constant(dims, weights).get_output(0)

    def project(x: trt.ITensor, name: str) -> trt.ITensor:
        return network.add_matrix_multiply(x, none, constants[name], transpose).get_output(0)

    def both(x: trt.ITensor, y: trt.ITensor, how: trt.ElementWiseOperation = add) -> trt.ITensor:
        return network.add_elementwise(x, y, how).get_output(0)

    ids, state = network.add_input("ids", trt.int32, (1, 8)), network.add_input("x", trt.bfloat16, (1, 8, hidden))
    state = both(state, network.add_gather(constants["table"], ids, 0).get_output(0))
    for layer in range((len(shapes) - 1) // 5):
        state = both(state, project(project(state, f"q{layer}"), f"o{layer}"))
        wide = both(project(state, f"gate{layer}"), project(state, f"up{layer}"), trt.ElementWiseOperation.PROD)
        state = both(state, project(wide, f"down{layer}"))
    head = network.add_shuffle(constants["table"])
    head.reshape_dims = (1, *shapes["table"])
    network.mark_output(network.add_matrix_multiply(state, none, head.get_output(0), transpose).get_output(0))

    class Counter(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.bytes = 0

        def write(self, data: bytes) -> int:
            self.bytes += len(data)
            return len(data)

    written = Counter()
    if not builder.build_serialized_network_to_stream(network, config, written):
        raise SystemExit("TensorRT-RTX built nothing")
    return written.bytes


def resident_mb() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmRSS:"))


def _watch(peak: list[float], done: threading.Event) -> None:
    while not done.is_set():
        peak[0] = max(peak[0], resident_mb())
        time.sleep(0.02)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""The process that makes one plan: ``python -m trtllm_dflash.engine.plan_worker``, a job on stdin, events on stdout.

A process of its own because

- a plan's bytes follow the order of addresses inside TensorRT's builder: only a fresh process without address-space
  randomisation makes the same plan twice;
- the builder's memory goes back to the system when it ends, so the peak is one network's;
- whatever the builder does to the process (it can terminate it) becomes an error message.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.typed_json import from_json, to_json
from trtllm_dflash.engine.plan_facts import Lowering, Network, WeightsMode
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.ops.tensorrt_library import TensorRTBackend

_ADDR_NO_RANDOMIZE, _QUERY, _PR_SET_PDEATHSIG = 0x0040000, 0xFFFFFFFF, 1


@dataclass(frozen=True)
class PlanJob:
    """One network to make.

    Attributes:
        backend, network, lowering, weights: which. checkpoint: checkpoint directory. rank: whose file.
        limits: of the engine. target_sm: compute capabilities. file: plan file to write.
        name: its path in the engine directory. timing_cache: file to start from and to update, or None.
        plugin_library: file of the plugin lowering's library, else None.
    """

    backend: TensorRTBackend
    network: Network
    lowering: Lowering
    weights: WeightsMode
    checkpoint: str
    rank: int
    limits: BuildLimits
    target_sm: tuple[int, ...]
    file: str
    name: str
    timing_cache: str | None
    plugin_library: str | None = None


def make_plan(job: PlanJob, emit_event: Any) -> None:
    """Emit and build the job's network; facts go to ``emit_event``."""
    import torch

    from trtllm_dflash.checkpoint.host_memory import PeakMemory
    from trtllm_dflash.checkpoint.trtllm_config import read_drafter_config, read_target_config
    from trtllm_dflash.engine.rank_file import RankFile
    from trtllm_dflash.engine.tensorrt_compile import CompileOptions, compile_plan
    from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
    from trtllm_dflash.engine.tensorrt_emit import emit_network
    from trtllm_dflash.ops.tensorrt_library import load_tensorrt
    from trtllm_dflash.ops.tensorrt_plugin import RegistryPluginLayers

    peak = PeakMemory()
    root = Path(job.checkpoint)
    target_config, mapping, _ = read_target_config(root / "target" / "config.json")
    drafter_file = root / "drafter" / "config.json"
    shapes_only = job.weights == "external"

    files = {
        model: RankFile(root / model / f"rank{job.rank}.safetensors", shapes_only=shapes_only)
        for model in (("target", "drafter") if drafter_file.is_file() else ("target",))
    }

    def release_weights() -> None:
        # The builder copies embedded weights; the pages they were copied from need not stay.
        for file in files.values():
            file.release_pages()

    library = load_tensorrt(job.backend)
    request = NetworkRequest(
        library=library,
        lowering=job.lowering,
        weights=job.weights,
        target_config=target_config,
        drafter_config=read_drafter_config(drafter_file) if drafter_file.is_file() else None,
        limits=job.limits,
        dtype=getattr(torch, target_config.dtype),
        target=files["target"],
        drafter=files.get("drafter"),
        rank=job.rank,
        ranks=mapping.tp_size,
        plugins=None if job.plugin_library is None else RegistryPluginLayers(library.trt, job.plugin_library),
    )
    emitted = emit_network(request, job.network)
    cache_file = None if job.timing_cache is None else Path(job.timing_cache)
    options = CompileOptions(
        job.target_sm,
        cache_file.read_bytes() if cache_file is not None and cache_file.is_file() else None,
        lambda label, done, total: emit_event({"progress": [label, done, total]}),
        release_weights,
    )
    plan = compile_plan(
        emitted, Path(job.file), name=job.name, lowering=job.lowering, weights=job.weights, options=options
    )
    if cache_file is not None and plan.timing_cache is not None:
        temporary = cache_file.with_name(cache_file.name + ".partial")
        temporary.write_bytes(plan.timing_cache)
        temporary.replace(cache_file)
    emit_event({"facts": to_json(plan.facts), "peak_host_mb": peak.peak_mb(), "warnings": emitted.log.warnings[:20]})


def main() -> None:
    """Run the job on stdin."""
    _start_again_without_randomisation()
    _end_with_the_parent()
    # TensorRT may print to the real stdout; events then have a stream of their own.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit_event(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    job = from_json(PlanJob, JsonObject(json.load(sys.stdin), Path("job")))
    failed = False

    def run() -> None:
        nonlocal failed
        try:
            make_plan(job, emit_event)
        except DFlashError as error:
            failed = True
            emit_event({"error": type(error).__name__, "message": error.message, "hint": error.hint})
        except BaseException:
            failed = True
            raise

    _use_one_processor()
    # A new thread has a memory arena of its own, whose addresses do not depend on what happened before: on lengths of
    # paths, for one.
    builder = threading.Thread(target=run)
    builder.start()
    builder.join()
    sys.exit(1 if failed else 0)


def _start_again_without_randomisation() -> None:
    """Replace this process by itself with fixed addresses; where the system forbids that, plans only lose their
    byte-for-byte reproducibility."""
    try:
        libc = ctypes.CDLL(None)
        persona = libc.personality(_QUERY)
        if persona < 0 or persona & _ADDR_NO_RANDOMIZE or libc.personality(persona | _ADDR_NO_RANDOMIZE) < 0:
            return
        if not libc.personality(_QUERY) & _ADDR_NO_RANDOMIZE:
            return
    except (OSError, AttributeError):
        return
    os.execv(sys.executable, [sys.executable, "-m", "trtllm_dflash.engine.plan_worker"])


def _end_with_the_parent() -> None:
    """A command that is killed with ``kill -9`` takes its worker along."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _use_one_processor() -> None:
    """The builder's threads allocate as they happen to run; it is nearly serial, so one processor costs no time."""
    with suppress(OSError, AttributeError):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[os.getpid() % len(allowed)]})


def job_to_json(job: PlanJob) -> str:
    """A job as the worker reads it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()

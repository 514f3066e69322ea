"""Plans of every network and rank: worker processes, their progress, their failures, and the facts they leave."""

from __future__ import annotations

import compileall
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import trtllm_dflash.errors as errors
from trtllm_dflash.checkpoint.read import Checkpoint
from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.typed_json import from_json, to_json
from trtllm_dflash.engine.plan_facts import Lowering, Network, PlanFacts, TensorRTFacts, WeightsMode
from trtllm_dflash.engine.plan_lowering import ChosenPluginLibrary
from trtllm_dflash.engine.plan_worker import PlanJob, job_to_json
from trtllm_dflash.engine.tensorrt_emission import linear_row_tokens
from trtllm_dflash.errors import BuildError, EngineError
from trtllm_dflash.ops.tensorrt_library import TensorRTBackend

BuildProgress = Callable[[str, int, int], None]

PLAN_FILES: dict[Network, str] = {
    "target": "target/rank{rank}.engine",
    "inject": "drafter/rank{rank}.inject.engine",
    "draft": "drafter/rank{rank}.engine",
}
"""Plan of each network, relative to the engine directory; its facts lie beside it with ``.json`` added."""

# Two settings of glibc's allocator.
# It raises its threshold for memory of its own as blocks are freed, and then keeps what the builder frees in fragments
# between what it still uses, more or less of them by chance. A fixed threshold (glibc's own first value) gives such
# blocks back.
# Its threads hand the blocks of others back after seven of a size, so that the addresses of one thread, and with them
# the plan, follow from how the processor was shared. Without that bound a thread keeps small blocks to its end.
_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072:glibc.malloc.tcache_count=65535"}
_WORKER_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")

_FIRST_DESCRIPTOR = 200
WORKER = ("-m", "trtllm_dflash.engine.plan_worker")
"""Arguments of the Python process that makes one plan."""


@cache
def _compile_modules() -> None:
    """Compile this package to bytecode before a worker imports it.

    A worker that compiles a module itself lays out its memory differently from the next one, which reads the bytecode;
    TensorRT-RTX writes some of what lies at those places into the plan. Where bytecode cannot be kept, every worker
    compiles, and all are alike again.
    """
    compileall.compile_dir(Path(errors.__file__).parent, quiet=2)


@dataclass(frozen=True)
class PlanOptions:
    """What ``build`` was asked for, for either TensorRT.

    Attributes:
        backend, version: TensorRT. lowering, weights: see ``plan_facts``. target_sm: compute capabilities.
        plugin_library: of the plugin lowering, else None.
        timing_cache: file that is read and updated, or None. progress: (phase, done, total) of the builder.
    """

    backend: TensorRTBackend
    version: str
    lowering: Lowering
    weights: WeightsMode
    target_sm: tuple[int, ...]
    plugin_library: ChosenPluginLibrary | None = None
    timing_cache: Path | None = None
    progress: BuildProgress | None = None


def build_plans(source: Checkpoint, directory: Path, limits: BuildLimits, options: PlanOptions) -> TensorRTFacts:
    """Build every network of every rank into ``directory`` and write each plan's facts beside it.

    The plugin library is copied beside the plans: they run with the very library they were built with.

    Raises:
        BuildError: a network could not be built, with TensorRT's reason and our layer.
    """
    networks: tuple[Network, ...] = ("target",) if source.drafter_config is None else ("target", "inject", "draft")
    library = options.plugin_library
    if library is not None:
        (directory / library.facts.file).parent.mkdir()
        shutil.copyfile(library.path, directory / library.facts.file)
    peak = 0.0
    for rank in range(source.mapping.tp_size):
        for network in networks:
            name = PLAN_FILES[network].format(rank=rank)
            job = PlanJob(
                backend=options.backend,
                network=network,
                lowering=options.lowering,
                weights=options.weights,
                checkpoint=str(source.path.absolute()),
                rank=rank,
                limits=limits,
                target_sm=options.target_sm,
                file=str((directory / name).absolute()),
                name=name,
                timing_cache=None if options.timing_cache is None else str(options.timing_cache.absolute()),
                plugin_library=None if library is None else str(library.path),
            )
            facts, peak_mb = run_plan_worker(job, options.progress)
            peak = max(peak, peak_mb)
            text = json.dumps(to_json(facts), indent=1) + "\n"
            (directory / (name + ".json")).write_text(text, encoding="utf-8")
    return TensorRTFacts(
        package=options.backend,
        version=options.version,
        target_sm=options.target_sm,
        lowering=options.lowering,
        weights=options.weights,
        cache="linear" if options.lowering == "native" else "paged",
        row_tokens=linear_row_tokens(limits) if options.lowering == "native" else 0,
        peak_host_mb=round(peak, 1),
        plugin_library=None if library is None else library.facts,
    )


def read_plan_facts(directory: Path, network: Network, rank: int) -> PlanFacts:
    """Facts of one plan of an engine directory.

    Raises:
        EngineError: there is no such plan. ConfigError: its facts are damaged.
    """
    file = directory / (PLAN_FILES[network].format(rank=rank) + ".json")
    if not file.is_file():
        raise EngineError(f"{file}: no such file", hint="the engine directory is incomplete; build it again")
    return from_json(PlanFacts, read_json(file))


def run_plan_worker(job: PlanJob, progress: BuildProgress | None) -> tuple[PlanFacts, float]:
    """Run one job: facts and peak resident memory of the worker in MB.

    Raises:
        BuildError and what else the worker raised; BuildError when it died.
    """
    _compile_modules()
    # Nothing of how this command was called may reach the worker: see its docstring.
    search = [str(Path(errors.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    absolute = dict.fromkeys(os.path.abspath(entry) for entry in search)
    environment = {name: os.environ[name] for name in _WORKER_ENVIRONMENT if name in os.environ}
    environment |= {"PYTHONHASHSEED": "0", **_ALLOCATOR, "PYTHONPATH": os.pathsep.join(absolute)}
    command = [sys.executable, *WORKER]
    result: dict[str, Any] | None = None
    with ExitStack() as opened:
        complaints = opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        # Paths of any length reach the worker as descriptors of three digits.
        plan_file = _descriptor(opened, job.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        checkpoint = _descriptor(opened, job.checkpoint, os.O_RDONLY | os.O_DIRECTORY)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            cwd="/",
            pass_fds=(plan_file, checkpoint),
            text=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            there = replace(job, file=f"/proc/self/fd/{plan_file}", checkpoint=f"/proc/self/fd/{checkpoint}")
            process.stdin.write(job_to_json(there))
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                if "progress" not in event:
                    result = event
                elif progress is not None:
                    progress(*event["progress"])
            code = process.wait()
        finally:
            # Also after an interrupt: no worker outlives the command.
            process.kill()
            process.wait()
        complaints.seek(0)
        stderr = complaints.read()
    if code != 0 or result is None or "error" in result:
        Path(job.file).unlink(missing_ok=True)
    if result is not None and "error" in result:
        kind = getattr(errors, str(result["error"]), BuildError)
        raise kind(result["message"], hint=result["hint"])
    if code != 0 or result is None:
        raise _worker_died(job, code, stderr)
    facts = from_json(PlanFacts, JsonObject(result["facts"], Path(job.name + ".json")))
    return facts, float(result["peak_host_mb"])


def _descriptor(opened: ExitStack, path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o644)
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    finally:
        os.close(descriptor)
    opened.callback(os.close, high)
    return high


def _worker_died(job: PlanJob, code: int, stderr: str) -> BuildError:
    where = f"network {job.network} of rank {job.rank}"
    if code == -signal.SIGKILL:
        return BuildError(
            f"{where}: the process that builds the plan was killed, probably for lack of host memory",
            hint="use --weights external, a smaller --max-seq-len, or a machine with more memory",
        )
    last = [line for line in stderr.strip().splitlines() if line.strip()][-3:]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return BuildError(f"{where}: the process that builds the plan ended with {how}: {' | '.join(last)}")

"""From the settings that a sweep chose to the arguments of ``deploy``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.bench.targets import read_deployment
from trtllm_dflash.engine.directory import open_engine_directory
from trtllm_dflash.errors import ConfigError


@dataclass(frozen=True)
class SweepChoice:
    """The engine directory that a sweep chose, and remarks for whoever deploys it."""

    engines: Path
    remarks: tuple[str, ...]


def choice_of_sweep(folder: Path, engines: Path | None = None) -> SweepChoice:
    """Read a sweep's ``deployment.json`` and see that its engine directory is built for what it says.

    Limits live in the engine directory alone, so settings that differ from them are a matter for ``build``.

    Args:
        folder: the sweep's directory. engines: where the engine directory lies now; None takes the recorded place.

    Raises:
        ConfigError: there are no settings, or the engine serves another block size than the one that was chosen.
    """
    chosen = read_deployment(folder)
    path = engines or Path(str(chosen["engines"]))
    directory = open_engine_directory(path, verify=False)
    limits = directory.limits
    served = limits.block_size if directory.drafter_config is not None else 1
    if chosen["block_size"] != served:
        asked = (
            "convert again with --drafter none, and build"
            if chosen["block_size"] == 1
            else f"trtllm-dflash build -c CHECKPOINT -o ENGINES --block-size {chosen['block_size']} "
            f"--max-batch-size {chosen['max_concurrency']}"
        )
        raise ConfigError(
            f"{path}: serves with block size {served}, "
            f"the sweep chose {chosen['config']!r} with {chosen['block_size']}",
            hint=f"{asked}; then deploy --from-sweep {folder} -e ENGINES",
        )
    remarks = [
        f"chosen by the sweep: {chosen['config']} at concurrency {chosen['max_concurrency']}, {chosen['target']}"
    ]
    if limits.max_batch_size > chosen["max_concurrency"]:
        remarks.append(
            f"the engine runs up to {limits.max_batch_size} requests at a time; the target was met with "
            f"{chosen['max_concurrency']}: to hold it under more load, build with --max-batch-size "
            f"{chosen['max_concurrency']}"
        )
    if limits.max_batch_size < chosen["max_concurrency"]:
        remarks.append(
            f"the engine runs up to {limits.max_batch_size} requests at a time: of {chosen['max_concurrency']} the "
            "rest waits, as it did in the sweep"
        )
    return SweepChoice(path, tuple(remarks))

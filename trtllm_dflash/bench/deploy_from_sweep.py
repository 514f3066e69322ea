"""From the settings that a sweep chose to the arguments of ``deploy``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.bench.targets import read_deployment
from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.engine.directory import open_engine_directory
from trtllm_dflash.errors import ConfigError


@dataclass(frozen=True)
class SweepChoice:
    """What a sweep chose, as arguments of ``deploy``, and remarks for whoever deploys it."""

    engines: Path
    speculation: SpeculationMode
    block_size: int | None
    max_running: int
    kv_cache_tokens: int | None
    remarks: tuple[str, ...]


def choice_of_sweep(folder: Path, engines: Path | None = None) -> SweepChoice:
    """Read a sweep's ``deployment.json`` and see that its engine directory can do what it says.

    Args:
        folder: the sweep's directory. engines: where the engine directory lies now; None takes the recorded place.

    Raises:
        ConfigError: there are no settings, or the engine was built for smaller blocks than the one that was chosen.
    """
    chosen = read_deployment(folder)
    path = engines or Path(str(chosen["engines"]))
    directory = open_engine_directory(path, verify=False)
    limits = directory.limits
    built = limits.block_size if directory.drafter_config is not None else 1
    size, concurrency = int(chosen["block_size"]), int(chosen["max_concurrency"])
    if size > built:
        raise ConfigError(
            f"{path}: was built for blocks of {built}, the sweep chose {chosen['config']!r} with {size}",
            hint=f"trtllm-dflash build -c CHECKPOINT -o ENGINES --block-size {size} --max-batch-size {concurrency}; "
            f"then deploy --from-sweep {folder} -e ENGINES",
        )
    remarks = [f"chosen by the sweep: {chosen['config']} at concurrency {concurrency}, {chosen['target']}"]
    if limits.max_batch_size < concurrency:
        remarks.append(
            f"the engine runs up to {limits.max_batch_size} requests at a time: of {concurrency} the rest waits, as it "
            "did in the sweep"
        )
    mode: SpeculationMode = "off" if size == 1 else "auto" if chosen["speculation"] == "auto" else "on"
    return SweepChoice(
        engines=path,
        speculation=mode,
        block_size=size if size > 1 else None,
        max_running=min(concurrency, limits.max_batch_size),
        kv_cache_tokens=chosen.get("kv_cache_tokens"),
        remarks=tuple(remarks),
    )

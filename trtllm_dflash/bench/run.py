"""One measured run of an open configuration."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dflash.bench.configuration import Opened
from trtllm_dflash.bench.energy import EnergyMeter
from trtllm_dflash.bench.load import Load, Progress, run_load
from trtllm_dflash.bench.measurement import Measurement, measure
from trtllm_dflash.bench.stages import StageClock
from trtllm_dflash.bench.workload import Workload


@dataclass(frozen=True)
class Run:
    """Figures of one run. ``stage_s``: seconds by stage within the window, None where nobody can say."""

    measurement: Measurement
    stage_s: dict[str, float] | None


def run_point(opened: Opened, workload: Workload, load: Load, *, progress: Progress | None = None) -> Run:
    """Put ``load`` on an open configuration and measure it.

    Raises:
        EngineError: every measured request failed.
    """
    meter = EnergyMeter(opened.gpu_uuids)
    clock = StageClock(opened.llm)
    joules: float | None = None
    stages: dict[str, float] | None = None

    def mark(moment: str) -> None:
        nonlocal joules, stages
        if moment == "begin":
            meter.begin()
            clock.begin()
        else:
            joules, stages = meter.end(), clock.end()

    try:
        result = run_load(opened.endpoint, opened.prompts, workload.params, load, progress=progress, on_measured=mark)
    finally:
        clock.close()
    return Run(measure(result, gpus=opened.gpus, joules=joules), stages)

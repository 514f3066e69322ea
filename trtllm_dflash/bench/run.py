"""One measured run of an open configuration."""

from __future__ import annotations

from trtllm_dflash.bench.aiperf import run_aiperf
from trtllm_dflash.bench.configuration import Opened
from trtllm_dflash.bench.energy import EnergyMeter
from trtllm_dflash.bench.load import Load, Progress, run_load
from trtllm_dflash.bench.measurement import Measurement, measure
from trtllm_dflash.bench.workload import Workload


def run_point(opened: Opened, workload: Workload, load: Load, *, progress: Progress | None = None) -> Measurement:
    """Put ``load`` on an open configuration and measure it.

    Raises:
        EngineError: every measured request failed.
    """
    meter = EnergyMeter(opened.gpu_uuids)
    joules: float | None = None

    def mark(moment: str) -> None:
        nonlocal joules
        if moment == "begin":
            meter.begin()
        else:
            joules = meter.end()

    if opened.served is not None and opened.configuration.load_generator == "aiperf":
        own = opened.configuration
        sent = run_aiperf(
            opened.served,
            opened.prompts,
            workload.params,
            load,
            tokenizer=own.tokenizer,
            command=own.aiperf_command,
        )
        return measure(sent, gpus=opened.gpus)
    result = run_load(opened.endpoint, opened.prompts, workload.params, load, progress=progress, on_measured=mark)
    return measure(result, gpus=opened.gpus, joules=joules)

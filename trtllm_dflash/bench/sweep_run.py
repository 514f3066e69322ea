"""Running a sweep: every run of the plan that is not in the journal yet."""

from __future__ import annotations

import datetime
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch

from trtllm_dflash.bench.configuration import Configuration, Opened, longest_prompt, open_configuration
from trtllm_dflash.bench.load import Load
from trtllm_dflash.bench.machine import probe
from trtllm_dflash.bench.run import run_point
from trtllm_dflash.bench.sweep_configs import fingerprint
from trtllm_dflash.bench.sweep_journal import RunRecord, SweepJournal
from trtllm_dflash.bench.sweep_plan import PointKey, SweepPlan, method_facts, method_fingerprint
from trtllm_dflash.bench.workload import Workload
from trtllm_dflash.config.typed_json import to_json

SweepProgress = Callable[[str, int, int], None]
logger = logging.getLogger(__name__)


class Opener(Protocol):
    """Opens a configuration; :func:`~trtllm_dflash.bench.configuration.open_configuration` is one."""

    def __call__(
        self,
        configuration: Configuration,
        workload: Workload,
        *,
        device: str | None = None,
        max_prompt_tokens: int | None = None,
        concurrency: int | None = None,
    ) -> Opened:
        """See :func:`~trtllm_dflash.bench.configuration.open_configuration`."""


def run_sweep(
    plan: SweepPlan,
    workload: Workload,
    folder: Path,
    *,
    progress: SweepProgress | None = None,
    opener: Opener = open_configuration,
    fingerprint_of: Callable[[Configuration], str] = fingerprint,
) -> tuple[dict[str, object], list[RunRecord]]:
    """Measure what is missing of ``plan`` in ``folder``; returns (facts of the method, runs of the plan).

    Runs of which requests failed count as missing when it begins. Every finished run is on disk before the next
    begins: killed at any moment and called again, it goes on.

    Args:
        progress: told (what, runs finished, runs in all).
        opener, fingerprint_of: for engines that no directory holds.

    Raises:
        ConfigError: ``folder`` holds a sweep that this one cannot continue. EngineError: a configuration fails.
    """
    by_label = {configuration.label: configuration for configuration in plan.configurations}
    method = method_facts(plan, workload)
    order = plan.order()
    with SweepJournal(folder, method, method_fingerprint(method)) as journal:
        prints = {label: fingerprint_of(configuration) for label, configuration in by_label.items()}
        finished = set().union(*(journal.finished(label, prints[label]) for label in by_label))
        with _Engines(plan, workload, opener) as engines:
            for key in order:
                if key in finished:
                    continue
                if progress is not None:
                    progress(f"{key.label}, concurrency {key.concurrency}", len(finished), len(order))
                run = _measure(engines.opened(by_label[key.label]), key, plan, workload, prints[key.label])
                journal.add(run)
                finished.add(key)
        wanted = set(order)
        return method, [run for run in journal.runs if run.key in wanted]


def _measure(opened: Opened, key: PointKey, plan: SweepPlan, workload: Workload, print_: str) -> RunRecord:
    steadiness = probe()
    load = Load(key.concurrency, None, plan.requests(key.concurrency))
    measurement = run_point(opened, workload, load)
    return RunRecord(
        key=key,
        fingerprint=print_,
        facts=opened.facts,
        result=to_json(measurement),
        probe=asdict(steadiness),
        at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


class _Engines:
    """Open configurations, the least recently used of which is closed when there are too many."""

    def __init__(self, plan: SweepPlan, workload: Workload, opener: Opener) -> None:
        self._plan, self._workload, self._opener = plan, workload, opener
        self._most = plan.max_open or len(plan.configurations)
        self._limit = longest_prompt(plan.configurations, workload.params.max_tokens)
        self._open: OrderedDict[str, Opened] = OrderedDict()

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._open:
            self._close_oldest()

    def opened(self, configuration: Configuration) -> Opened:
        label = configuration.label
        if label not in self._open:
            while len(self._open) >= self._most:
                self._close_oldest()
            # Prompts that one engine cannot take are left out of all: the points are of the same prompts.
            self._open[label] = self._opener(
                configuration,
                self._workload,
                device=self._plan.device,
                max_prompt_tokens=self._limit,
                concurrency=max(self._plan.concurrencies),
            )
        self._open.move_to_end(label)
        return self._open[label]

    def _close_oldest(self) -> None:
        self._open.popitem(last=False)[1].close()
        # The next engine plans its memory by what is free: weights in reference cycles, and what torch keeps for later,
        # have to be given back now.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

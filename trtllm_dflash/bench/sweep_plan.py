"""Which points a sweep measures, with how many requests, in which order."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.bench.load import MAX_USERS
from trtllm_dflash.bench.workload import Workload
from trtllm_dflash.errors import ConfigError

# Raised when the same engine would get other figures. 2: whole requests, after a first wave that is not measured.
# 1 (not in its documents): tokens of a window that began with the end of the first warm-up request.
METHOD_VERSION = 2


@dataclass(frozen=True, order=True)
class PointKey:
    """One run of a sweep: a configuration's label at a concurrency, for the nth time (from 0)."""

    repeat: int
    concurrency: int
    label: str


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is to measure.

    Attributes:
        configurations, concurrencies: the grid. repeats: runs per point; 3 are needed for a confidence interval.
        requests_per_user, min_requests: measured requests of a run are max(min_requests, requests_per_user *
            concurrency). device: of engines in this process.
        max_open: engines that may be loaded at a time; None for all of them.
    """

    configurations: tuple[Configuration, ...]
    concurrencies: tuple[int, ...]
    repeats: int = 3
    requests_per_user: int = 4
    min_requests: int = 8
    device: str | None = None
    max_open: int | None = None

    def __post_init__(self) -> None:
        if not self.concurrencies or min(self.concurrencies) < 1 or max(self.concurrencies) > MAX_USERS:
            raise ConfigError(f"concurrencies are {list(self.concurrencies)}, expected numbers from 1 to {MAX_USERS}")
        if len(set(self.concurrencies)) != len(self.concurrencies):
            raise ConfigError(f"concurrencies are {list(self.concurrencies)}, expected each once")
        for name, value in (
            ("repeats", self.repeats),
            ("requests per user", self.requests_per_user),
            ("least requests", self.min_requests),
            ("engines open at a time", self.max_open if self.max_open is not None else 1),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")

    def requests(self, concurrency: int) -> int:
        """Measured requests of a run."""
        return max(self.min_requests, self.requests_per_user * concurrency)

    def order(self) -> list[PointKey]:
        """Every run, ordered so that a drift of the machine hits all configurations alike.

        With all engines loaded, neighbours in time are the same load on different configurations. Else an engine runs
        all its concurrencies before the next is loaded. Either way every second repeat goes backwards (A B C C B A), so
        that a linear drift cancels.
        """
        labels = [configuration.label for configuration in self.configurations]
        together = self.max_open is None or self.max_open >= len(labels)
        keys: list[PointKey] = []
        for repeat in range(self.repeats):
            if together:
                grid = [(users, label) for users in self.concurrencies for label in labels]
            else:
                grid = [(users, label) for label in labels for users in self.concurrencies]
            if repeat % 2:
                grid.reverse()
            keys += [PointKey(repeat, users, label) for users, label in grid]
        return keys


def method_facts(plan: SweepPlan, workload: Workload) -> dict[str, object]:
    """What two runs must share to be points of one sweep."""
    return {
        "version": METHOD_VERSION,
        "workload": workload.facts(),
        "requests_per_user": plan.requests_per_user,
        "min_requests": plan.min_requests,
        "device": plan.device,
    }


def method_fingerprint(facts: dict[str, object]) -> str:
    """SHA-256 of :func:`method_facts`, hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """``1,2,4`` or ``1..64`` (powers of two from the first to the last), or both: ascending, each once."""
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        # isdecimal: int() does not take all that isdigit() does, "²" for example.
        if not first.isdecimal() or (dots and not last.isdecimal()) or int(first) < 1:
            raise ConfigError(f"concurrencies are {text!r}, expected for example 1,2,4,8 or 1..256")
        value = int(first)
        found.add(value)
        while dots and value * 2 <= int(last):
            value *= 2
            found.add(value)
        if dots:
            found.add(int(last))
    return tuple(sorted(found))

"""The journal of a sweep: finished runs, one JSON line each, on disk before the next run begins.

A run that is in the journal is never measured again, unless requests of it failed; whatever kills the process, at most
the run in progress is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from trtllm_dflash.bench.sweep_plan import PointKey
from trtllm_dflash.errors import ConfigError

NAME = "runs.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its key, the configuration's fingerprint and facts, and the figures, as JSON values."""

    key: PointKey
    fingerprint: str
    facts: dict[str, Any]
    result: dict[str, Any]
    probe: dict[str, float]
    at: str

    @property
    def is_whole(self) -> bool:
        """Whether every request of the run was answered."""
        return not self.result["errors"]


class SweepJournal:
    """The journal in an output directory, held by one process at a time.

    Args:
        folder: the output directory; made when it is not there. method: facts that all runs share.
        method_fingerprint: of these facts.

    Raises:
        ConfigError: another sweep is running there; the journal is of another method or version, or damaged.
    """

    def __init__(self, folder: Path, method: dict[str, object], method_fingerprint: str) -> None:
        self._path = folder / NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        try:
            self._lock()
            self._by_key = {run.key: run for run in self._read(method_fingerprint)}
            if not self._path.stat().st_size:
                header = {
                    "kind": "sweep",
                    "schema_version": SCHEMA_VERSION,
                    "method": method,
                    "method_sha256": method_fingerprint,
                }
                self._append(header)
                _sync_directory(folder)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SweepJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:
            # What a full disk did not take is tried again here; the first failure says where.
            if kind is None:
                raise

    def add(self, run: RunRecord) -> None:
        """Append a finished run, in place of an earlier one of the same key; on return it is on disk."""
        self._append(
            {
                "kind": "run",
                "config": run.key.label,
                "concurrency": run.key.concurrency,
                "repeat": run.key.repeat,
                "fingerprint": run.fingerprint,
                "facts": run.facts,
                "result": run.result,
                "probe": run.probe,
                "at": run.at,
            }
        )
        self._by_key[run.key] = run

    @property
    def runs(self) -> list[RunRecord]:
        """Finished runs, the newest of each key, in the order in which the keys were first measured."""
        return list(self._by_key.values())

    def finished(self, label: str, fingerprint: str) -> set[PointKey]:
        """Runs of a configuration that need not be measured again: all of their requests were answered.

        Raises:
            ConfigError: there are runs of that label, but of another engine or other settings.
        """
        keys = set()
        for run in self.runs:
            if run.key.label != label:
                continue
            if run.fingerprint != fingerprint:
                raise ConfigError(
                    f"{self._path}: has runs of {label!r} with another engine or other settings",
                    hint="choose another output directory or label, or delete the old one",
                )
            if run.is_whole:
                keys.add(run.key)
        return keys

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{self._path}: another sweep is running here", hint="wait for it, or use another -o"
            ) from error

    def _read(self, method_fingerprint: str) -> list[RunRecord]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            # The line that a killed process was writing.
            self._file.truncate(whole)
        lines = data[:whole].splitlines()
        if not lines:
            return []
        header = self._parse(lines[0], 1)
        if header.get("kind") != "sweep" or header.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path}: is not a sweep's journal of version {SCHEMA_VERSION}", hint="use another -o"
            )
        if header.get("method_sha256") != method_fingerprint:
            raise ConfigError(
                f"{self._path}: was measured with other prompts, sampling or requests per point: "
                "its points cannot be mixed with new ones",
                hint="use another -o, or the options of the first run",
            )
        return [self._run(line, number) for number, line in enumerate(lines[1:], start=2)]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{self._path}, line {number}: not JSON: {error}", hint="use another -o") from error
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{self._path}, line {number}: got {type(entry).__name__}, expected an object", hint="use another -o"
            )
        return entry

    def _run(self, line: bytes, number: int) -> RunRecord:
        entry = self._parse(line, number)
        try:
            return _run(entry)
        except KeyError as error:
            raise ConfigError(
                f"{self._path}, line {number}: a run without {error}: the journal is damaged",
                hint="use another -o, or delete that line: the run is then measured again",
            ) from error

    def _append(self, entry: dict[str, object]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            error.filename = str(self._path)
            raise


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write ``path`` in one step: fill the yielded sibling, which then takes its place; after a failure it is gone."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # a read-only place refuses to remove what is not there
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write does not know its file, and nobody knows the partial one
            error.filename2 = None
        raise


def _run(entry: dict[str, Any]) -> RunRecord:
    key = PointKey(entry["repeat"], entry["concurrency"], entry["config"])
    if "errors" not in entry["result"]:
        raise KeyError("result.errors")
    return RunRecord(key, entry["fingerprint"], entry["facts"], entry["result"], entry["probe"], entry["at"])


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

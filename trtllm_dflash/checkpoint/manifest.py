"""The manifest of a directory: size and SHA-256 of every file, and the check against it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.errors import CheckpointError

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and lower-case hexadecimal SHA-256 of one file."""

    bytes: int
    sha256: str


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> FileRecord:
    """Read ``path`` once and record it.

    Args:
        path: the file. progress: called with the bytes read so far.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            if progress is not None:
                progress(size)
    return FileRecord(size, digest.hexdigest())


def hash_directory(
    root: Path, *, known: Mapping[str, FileRecord] | None = None, exclude: Iterable[str] = ("config.json",)
) -> dict[str, FileRecord]:
    """Record every file below ``root``, by path relative to it with forward slashes.

    Args:
        root: the directory.
        known: records that are already there and need no second reading.
        exclude: relative paths to leave out; the file that holds the manifest cannot hold its own hash.
    """
    left_out, records = set(exclude), dict(known or {})
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name not in left_out and name not in records:
            records[name] = hash_file(path)
    return dict(sorted(records.items()))


def manifest_to_json(records: Mapping[str, FileRecord]) -> dict[str, dict[str, object]]:
    """The ``files`` object of a config.json."""
    return {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in records.items()}


def manifest_from_json(files: JsonObject) -> dict[str, FileRecord]:
    """Parse a ``files`` object.

    Raises:
        ConfigError: a record without size or hash, or a path that leaves the directory.
    """
    records = {}
    for name in files:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise files.error(name, "a path inside the directory")
        record = files.child(name)
        records[name] = FileRecord(record.integer("bytes", minimum=0), record.string("sha256"))
    return records


def check_sizes(root: Path, records: Mapping[str, FileRecord]) -> None:
    """Check that every recorded file is there with the recorded size; reads no contents.

    Raises:
        CheckpointError: naming the first file that is missing, truncated or longer.
    """
    for name, record in records.items():
        path = root / name
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, but config.json lists it", hint=_HINT)
        size = path.stat().st_size
        if size != record.bytes:
            state = "truncated" if size < record.bytes else "changed"
            raise CheckpointError(f"{path}: {state}: found {size} bytes, config.json says {record.bytes}", hint=_HINT)


def verify_directory(
    root: Path, records: Mapping[str, FileRecord], progress: Callable[[int, int], None] | None = None
) -> None:
    """Check size and SHA-256 of every recorded file.

    Args:
        root: the directory. records: its manifest.
        progress: called with (bytes done, bytes in all) after each file.

    Raises:
        CheckpointError: naming the first file that is missing, truncated or changed.
    """
    check_sizes(root, records)
    done, total = 0, sum(record.bytes for record in records.values())
    for name, record in records.items():
        found = hash_file(root / name)
        if found != record:
            raise CheckpointError(
                f"{root / name}: changed: found SHA-256 {found.sha256}, config.json says {record.sha256}", hint=_HINT
            )
        done += record.bytes
        if progress is not None:
            progress(done, total)


_HINT = "the directory is damaged or was edited; make it anew with the command that wrote it and --force"

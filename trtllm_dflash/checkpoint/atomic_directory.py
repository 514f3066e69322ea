"""A directory that appears whole or not at all.

Files are written into a temporary sibling, flushed to disk and renamed. Whoever dies in between, even by ``kill -9``,
leaves the old directory or none; its temporary sibling is removed by the next run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_dflash.errors import CheckpointError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def directory_of_kind(kind: str) -> Callable[[Path], bool]:
    """Whether a path is a directory of this ``kind`` that the toolkit wrote, by its config.json."""

    def is_ours(path: Path) -> bool:
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(config, dict) and "format_version" in config and config.get("kind") == kind

    return is_ours


def _nothing(path: Path) -> bool:
    return False


def check_destination(final: Path, *, force: bool, is_ours: Callable[[Path], bool] = _nothing) -> None:
    """Refuse to overwrite what should not be overwritten.

    Args:
        final: the directory to be written.
        force: whether the user allows replacing a directory of ours.
        is_ours: whether an existing directory may be replaced by ``force``; nothing may by default.

    Raises:
        CheckpointError: ``final`` is a file, is not empty and ``force`` is false, or is not one of ours.
    """
    if not os.path.lexists(final):
        return
    if final.is_symlink() or not final.is_dir():
        raise CheckpointError(f"{final}: exists and is not a directory", hint="choose another output directory")
    if not any(final.iterdir()):
        return
    if not is_ours(final):
        raise CheckpointError(
            f"{final}: is not empty and is not what this command writes, so it is never overwritten",
            hint="choose another output directory",
        )
    if not force:
        raise CheckpointError(f"{final}: already exists", hint="pass --force to replace it")


@contextmanager
def atomic_directory(final: Path, *, force: bool = False, is_ours: Callable[[Path], bool] = _nothing) -> Iterator[Path]:
    """Write a directory in one step: ``with atomic_directory(final) as tmp:`` fill ``tmp``.

    On leaving the block normally everything is flushed to disk and ``tmp`` becomes ``final``; on an exception
    ``tmp`` is removed and ``final`` is untouched. Leftovers of dead runs beside ``final`` are removed first.

    Args:
        final: the directory to write; parents are made.
        force, is_ours: as in :func:`check_destination`, which is applied before and after.

    Yields:
        the temporary directory, on the same file system as ``final``.

    Raises:
        CheckpointError: as :func:`check_destination`; the place cannot be written, or the disk is full.
    """
    final = Path(os.path.abspath(final))
    check_destination(final, force=force, is_ours=is_ours)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final)
        temporary, lock = _make_locked_sibling(final)
    except OSError as problem:
        raise _cannot_write(final, problem) from problem
    try:
        yield temporary
        _flush_tree(temporary)
        check_destination(final, force=force, is_ours=is_ours)
        _move_into_place(temporary, final)
    except OSError as problem:
        if problem.errno not in _DISK_ERRORS:
            raise
        raise _cannot_write(final, problem) from problem
    finally:
        # After an exchange the old directory lies here.
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _cannot_write(final: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(
        f"{final}: cannot be written: {problem.strerror}", hint="free disk space or choose another output directory"
    )


def _siblings_prefix(final: Path) -> str:
    return f".{final.name}.partial-"


def _make_locked_sibling(final: Path) -> tuple[Path, int]:
    """A new sibling and a file descriptor that holds its lock; the kernel drops the lock when its holder dies."""
    while True:
        path = final.with_name(_siblings_prefix(final) + secrets.token_hex(4))
        path.mkdir()
        descriptor = _try_lock(path)
        if descriptor is not None:
            return path, descriptor


def _try_lock(path: Path) -> int | None:
    """Lock a directory that is still at ``path``, or None when somebody else has it or removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between mkdir and flock another run may have taken the new directory for a leftover and removed it.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _remove_leftovers(final: Path) -> None:
    for path in final.parent.glob(glob.escape(_siblings_prefix(final)) + "*"):
        descriptor = _try_lock(path)
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _flush_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for path in [*(os.path.join(directory, name) for name in files), directory]:
            _flush(path)


def _flush(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot flush a directory; its files are flushed all the same.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _move_into_place(temporary: Path, final: Path) -> None:
    if final.is_dir() and any(final.iterdir()):
        if not _exchange(temporary, final):
            # No atomic exchange here: for a moment there is no directory, never a mixed one.
            aside = final.with_name(_siblings_prefix(final) + secrets.token_hex(4))
            os.rename(final, aside)
            os.rename(temporary, final)
            shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(temporary, final)
    _flush(final.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step (Linux renameat2); False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return int(result) == 0

"""The temporary folder of one tritonserver, and what killed ones left behind.

A server that is stopped removes its own folder; SIGKILL, a crash of the machine or a container's end do not let it. So
the owner holds a lock on a file in the folder for as long as it lives: the kernel drops the lock with the process,
however that ended, and whoever starts next removes the folders that nobody holds. A process id in the name would not
do: ids are used again, and mean nothing in another container that shares the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trtllm-dflash-triton-"
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")
_SHM_PREFIX = re.compile(r"dflash_\d+_[0-9a-f]{8}_")


class RunDirectory:
    """A new folder, locked by this process until :meth:`remove` or its end; folders of dead owners are removed first.

    Attributes:
        path: the folder. shm_prefix: names of the server's shared memory begin with it.
        lock: descriptor of the locked file. A child that inherits it keeps the folder from being taken for abandoned.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.shm_prefix = f"dflash_{os.getpid()}_{secrets.token_hex(4)}_"
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.lock = -1
        try:
            self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            # For whoever finds the folder abandoned: this is left behind too.
            os.write(self.lock, self.shm_prefix.encode())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder and the shared memory, and give up the lock."""
        _remove(self.path, self.shm_prefix)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def remove_abandoned() -> list[Path]:
    """Remove folders (and shared memory) whose owner is gone; returns those removed. What cannot be looked at stays."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError), _taken_over(path) as shm_prefix:
            _remove(path, shm_prefix)
            removed.append(path)
    return removed


@contextlib.contextmanager
def _taken_over(path: Path) -> Iterator[str]:
    """Hold the lock of an abandoned folder; raises ``OSError`` when somebody holds it, or it is not a folder of ours.

    A folder without a lock file is one that is being made right now.
    """
    facts = path.lstat()
    if not path.is_dir() or path.is_symlink() or facts.st_uid != os.getuid():
        raise PermissionError(f"{path} is not ours")
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content = os.read(lock, 100).decode(errors="replace")
        if not content:
            raise BlockingIOError(f"{path} is being made")
        yield content
    finally:
        os.close(lock)


def _remove(path: Path, shm_prefix: str) -> None:
    if _SHM_PREFIX.fullmatch(shm_prefix):
        for region in _SHARED_MEMORY.glob(f"{shm_prefix}*"):
            region.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

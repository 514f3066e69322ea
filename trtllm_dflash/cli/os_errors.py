"""What the operating system refuses, in words: a full disk or a missing folder is no fault of this toolkit."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

# errno → (the next step, exit code): 2 where another path would do, 1 where the machine has run out of something.
_STEPS: dict[int, tuple[str, int]] = {
    errno.ENOSPC: ("free disk space, or choose another place to write to", 1),
    errno.EDQUOT: ("free disk space, or choose another place to write to", 1),
    errno.EFBIG: ("choose a file system that takes files of this size", 1),
    errno.EIO: ("check the disk", 1),
    errno.EMFILE: ("allow more open files (ulimit -n), or ask for less at a time", 1),
    errno.ENFILE: ("allow more open files on this machine, or ask for less at a time", 1),
    errno.EROFS: ("choose a place that can be written to", 2),
    errno.EACCES: ("change the permissions, or choose another path", 2),
    errno.EPERM: ("change the permissions, or choose another path", 2),
    errno.ENOENT: ("check the path; the folder that a file is to be written into must exist", 2),
    errno.ENOTDIR: ("check the path", 2),
    errno.EISDIR: ("give a file, not a directory", 2),
    errno.EEXIST: ("choose another path", 2),
    errno.ENAMETOOLONG: ("choose a shorter path", 2),
    errno.ELOOP: ("check the symbolic links of that path", 2),
}


@dataclass(frozen=True)
class Refusal:
    """An ``OSError`` in words: ``message``, the next step, and the exit code it means."""

    message: str
    hint: str
    exit_code: int


def refusal_of(error: OSError) -> Refusal | None:
    """What ``error`` means to whoever typed the command; None for one that only a fault of the toolkit explains."""
    if error.errno not in _STEPS:
        return None
    hint, exit_code = _STEPS[error.errno]
    reason = error.strerror or os.strerror(error.errno)
    # A failed write does not know its file.
    return Refusal(reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}", hint, exit_code)

"""Peak resident memory of this process over a stretch of work."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


class PeakMemory:
    """Start watching on construction; :meth:`peak_mb` says the peak since then.

    Where the kernel cannot reset its peak counter (not Linux, locked-down containers), the peak is the process's
    since its start: an upper bound.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """Peak resident set in MB (10^6 bytes)."""
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            return int(peak.split()[1]) * 1024 / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

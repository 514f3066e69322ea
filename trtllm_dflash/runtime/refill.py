"""When to let waiting requests in: a prefill holds everybody up, so several short waits are better than many."""

from __future__ import annotations

# (running requests at least, slots that should be free before the next prefill).
_STEPS = ((64, 4), (32, 4), (16, 3), (8, 2))


class RefillPolicy:
    """Waits for a few free slots before the next prefill, and never longer than ``max_hold_s``.

    A prefill interrupts every running request; with many of them it pays to let several slots come free and fill them
    in one pass. The numbers are SGLang's (2, 3, 4, 4 slots at 8, 16, 32, 64 running requests).

    Args:
        slots: slots of the engine. max_hold_s: seconds that a request may be held although a slot is free.
    """

    def __init__(self, slots: int, max_hold_s: float = 0.02) -> None:
        self._slots = slots
        self._max_hold_s = max_hold_s
        self._held_since: float | None = None

    def is_open(self, waiting: int, running: int, free_slots: int, now: float) -> bool:
        """Whether waiting requests may be admitted at ``now`` (seconds of any steady clock)."""
        if waiting == 0 or free_slots == 0:
            self._held_since = None
            return False
        wanted = next((slots for least, slots in _STEPS if running >= least), 1)
        if free_slots < min(wanted, self._slots):
            if self._held_since is None:
                self._held_since = now
            if now - self._held_since < self._max_hold_s:
                return False
        self._held_since = None
        return True

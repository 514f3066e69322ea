"""Adaptive block size: the S that emits most tokens per second, from measured cycle times and running acceptance; the
whole block unless another is clearly better, or plain decoding at all.

With acceptance probabilities a_1, a_2, … of the block's positions (each given that the one before was kept), a cycle of
block size S emits ``1 + a_1 + a_1 a_2 + … + a_1 … a_(S-1)`` tokens in ``seconds(batch, S)``. S = 1 is plain decoding,
so speculation that does not pay is left off. With many short cycles the host takes longer than the device; then a cycle
takes the host's time, whatever its size.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

# Before anything was observed, and how many observations that belief is worth.
_PRIOR, _PRIOR_WEIGHT = 0.7, 8.0
# Observations are forgotten with this memory, in cycles of one request.
_MEMORY = 4000.0
# One cycle in this many tries the next larger block size, so that a change for the better is noticed.
_EXPLORE_EVERY = 128
# By how much a smaller block must look better than the largest: cycle times and acceptance are known no better. Plain
# decoding need not: never to be slower than either of the two is what the choice is for.
_MARGIN = 1.03
# Weight of the newest turn in the host's mean time, once there are enough of them.
_NEWEST = 0.05


@dataclass(frozen=True)
class CycleTable:
    """Seconds of a cycle by (batch, block size), measured on this engine and device.

    Between measured batches time is taken as linear; outside them as that of the nearest.
    """

    seconds: Mapping[tuple[int, int], float]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes measured, ascending."""
        return tuple(sorted({size for _, size in self.seconds}))

    def at(self, batch: int, block_size: int) -> float:
        """Seconds of a cycle of ``batch`` requests."""
        known = sorted(measured for measured, size in self.seconds if size == block_size)
        above = next((measured for measured in known if measured >= batch), known[-1])
        below = max((measured for measured in known if measured <= batch), default=known[0])
        low, high = self.seconds[below, block_size], self.seconds[above, block_size]
        if above == below:
            return high
        return low + (high - low) * (batch - below) / (above - below)


class BlockSizePolicy:
    """Chooses S for each cycle.

    Args:
        table: cycle times; its block sizes are the choices and include 1. limit: largest S to use.
    """

    def __init__(self, table: CycleTable, limit: int) -> None:
        self._table = table
        self._sizes = [size for size in table.block_sizes if size <= limit]
        self._reached = [0.0] * limit
        self._kept = [0.0] * limit
        self._cycles = 0
        # By size of the batch, in powers of two: what a few requests cost the host says nothing of many.
        self._host_s: dict[int, float] = {}
        self._turns: Counter[int] = Counter()
        # The loop asks at every cycle: what does not change between two cycles is kept.
        self._device_s: dict[int, list[float]] = {}
        self._expected: list[float] = []

    def acceptance(self) -> list[float]:
        """a_1 … a_(S-1) as believed now; where little was observed, the position before is what is believed."""
        beliefs = []
        belief = _PRIOR
        for reached, kept in zip(self._reached[1:], self._kept[1:], strict=True):
            belief = (kept + _PRIOR_WEIGHT * belief) / (reached + _PRIOR_WEIGHT)
            beliefs.append(belief)
        return beliefs

    def expected_tokens(self) -> list[float]:
        """Tokens that a cycle of block size 1, 2, … is believed to emit for one request."""
        if not self._expected:
            survivals = accumulate(self.acceptance(), operator.mul)
            self._expected = list(accumulate(survivals, initial=1.0))
        return self._expected

    def choose(self, batch: int, useful: int) -> int:
        """S for the next cycle of ``batch`` requests, none of which can use more than ``useful`` rows."""
        self._cycles += 1
        if batch not in self._device_s:
            self._device_s[batch] = [self._table.at(batch, size) for size in self._sizes]
        expected, host_s = self.expected_tokens(), self._host_s.get(batch.bit_length(), 0.0)
        rates = [
            (expected[size - 1] / max(device_s, host_s), size)
            for size, device_s in zip(self._sizes, self._device_s[batch], strict=True)
            if size <= useful
        ]
        best_rate, best = max(rates)
        largest_rate, largest = rates[-1]
        if best_rate < _MARGIN * largest_rate:
            best = 1 if rates[0][0] > largest_rate else largest
        explores = best < largest and self._cycles % _EXPLORE_EVERY == 0
        return next(size for _, size in rates if size > best) if explores else best

    def observe_host(self, batch: int, seconds: float) -> None:
        """Learn from a turn of the loop that launched a cycle of ``batch`` requests and nothing else: what it took the
        host, without waiting for the device."""
        key = batch.bit_length()
        self._turns[key] += 1
        known = self._host_s.get(key, 0.0)
        self._host_s[key] = known + max(_NEWEST, 1 / self._turns[key]) * (seconds - known)

    def observe(self, block_size: int, accepted: Sequence[int]) -> None:
        """Learn from one cycle: ``accepted`` drafts of each of its requests."""
        if block_size == 1 or not accepted:
            return
        self._expected = []
        keep = max(0.0, 1.0 - len(accepted) / _MEMORY)
        counts = Counter(accepted)
        # Those that kept at least j drafts, from the longest down.
        at_least = sum(count for kept, count in counts.items() if kept >= block_size)
        for position in range(block_size - 1, 0, -1):
            at_least += counts[position]
            self._kept[position] = self._kept[position] * keep + at_least
            self._reached[position] = self._reached[position] * keep + at_least + counts[position - 1]

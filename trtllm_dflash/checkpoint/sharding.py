"""Tensor-parallel sharding: which rows or columns of a tensor each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_dflash.errors import CheckpointError


@dataclass(frozen=True)
class Segment:
    """Consecutive rows that are dealt out together.

    Attributes:
        rows: number of rows.
        units: pieces that are never cut (heads); ``rows`` is a multiple.
        replicate: with fewer units than ranks, ranks share a unit instead of failing.
    """

    rows: int
    units: int
    replicate: bool = False

    def slice_of(self, rank: int, tp_size: int) -> tuple[int, int]:
        """First row and number of rows that ``rank`` holds, within the segment."""
        unit_rows = self.rows // self.units
        if self.units % tp_size == 0:
            count = self.units // tp_size
            return rank * count * unit_rows, count * unit_rows
        return rank * self.units // tp_size * unit_rows, unit_rows


@dataclass(frozen=True)
class ShardRule:
    """How one tensor is dealt out over ranks.

    ``axis`` None: every rank holds all. 0: rows, segment by segment (query, key and value rows each by heads).
    1: equal ranges of columns; one-dimensional companions (biases, scales per output) go to every rank whole.
    """

    axis: int | None = None
    segments: tuple[Segment, ...] = ()

    def shard(self, tensor: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """The part of ``tensor`` that ``rank`` of ``tp_size`` holds; a view where possible."""
        if self.axis is None or tp_size == 1 or tensor.dim() <= self.axis:
            return tensor
        if self.axis == 1:
            count = tensor.shape[1] // tp_size
            return tensor.narrow(1, rank * count, count)
        parts, start = [], 0
        for segment in self.segments:
            first, count = segment.slice_of(rank, tp_size)
            parts.append(tensor.narrow(0, start + first, count))
            start += segment.rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shard_shape(self, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's part of a tensor of ``shape``; the same on every rank."""
        if self.axis is None or tp_size == 1 or len(shape) <= self.axis:
            return shape
        if self.axis == 1:
            return (shape[0], shape[1] // tp_size, *shape[2:])
        return (sum(segment.slice_of(0, tp_size)[1] for segment in self.segments), *shape[1:])


REPLICATED = ShardRule()
COLUMNS = ShardRule(axis=1)


def rows(*segments: Segment) -> ShardRule:
    """Sharding by rows."""
    return ShardRule(axis=0, segments=segments)


def padded_rows(count: int, tp_size: int) -> int:
    """``count`` rounded up to a multiple of ``tp_size``."""
    return -(-count // tp_size) * tp_size


def check_tp_size(model: str, tp_size: int, *, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
    """Check that a model can be dealt out over ``tp_size`` ranks.

    Key and value heads are replicated where there are fewer than ranks, if the ranks divide evenly among them.

    Args:
        model: ``target`` or ``drafter``, for the message.
        tp_size: ranks. num_heads, num_kv_heads, intermediate_size: the model's geometry.

    Raises:
        CheckpointError: naming the size that does not divide and the tp sizes that would work.
    """
    problem = None
    if num_heads % tp_size:
        problem = f"{num_heads} attention heads"
    elif num_kv_heads % tp_size and tp_size % num_kv_heads:
        problem = f"{num_kv_heads} key/value heads"
    elif intermediate_size % tp_size:
        problem = f"intermediate size {intermediate_size}"
    if problem is None:
        return
    possible = [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0) and intermediate_size % n == 0
    ]
    raise CheckpointError(
        f"--tp-size {tp_size}: the {model}'s {problem} cannot be divided over {tp_size} ranks",
        hint=f"tensor-parallel sizes that work for the {model}: {', '.join(map(str, possible))}",
    )

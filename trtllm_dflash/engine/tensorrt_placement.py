"""What a lowering adds to the three networks: its dialect, where rows lie, and its profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emission import Profile
from trtllm_dflash.ops.tensorrt_network import Columns


@dataclass(frozen=True)
class Placement:
    """Where the rows of a pass lie, under the names of the operation set.

    Paged caches have an input for each. For linear caches one ``LinearPass`` stands for slots, page table, context
    lengths and query starts; that is why only its dialect can tell what they are.

    Attributes:
        positions: of the rows. slots, page_table, context_lengths, query_starts: as ``engine.session.TargetInputs``.
        max_query: bound of queries per request, as the dialect wants it.
    """

    positions: Columns
    slots: Any = None
    page_table: Any = None
    context_lengths: Any = None
    query_starts: Any = None
    max_query: Any = 0


class LoweredInputs(Protocol):
    """A lowering at work on one network.

    Attributes:
        ops: its dialect, writing this network. tokens, logit_rows: dimensions of token inputs and of ``logit_rows``.
        positions: rows of the rotation tables.
    """

    @property
    def ops(self) -> Any: ...

    @property
    def tokens(self) -> tuple[int | str, ...]: ...

    @property
    def logit_rows(self) -> tuple[int | str, ...]: ...

    @property
    def positions(self) -> int: ...

    def target(self) -> Placement:
        """Inputs that place the rows of a target pass."""

    def inject(self) -> Placement:
        """Inputs that place the rows of an injection."""

    def draft(self, context_lengths: Columns, block_lengths: Columns, block_size: int) -> Any:
        """What the draft network has for a page table."""

    def cache_shape(self, kv_heads: int, head_dim: int) -> Sequence[int | str]:
        """Shape of one cache tensor of one layer."""

    def profiles(self, network: Network) -> list[Profile]:
        """Optimisation profiles of a network."""

"""Where a cycle's time goes, and how long cycles take: measured by the engine itself, before it serves anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trtllm_dflash.bench.configuration import Opened
from trtllm_dflash.bench.sweep_journal import written_whole
from trtllm_dflash.runtime.llm import LLM

_CONTEXT = 256


def stage_seconds(opened: Opened, concurrency: int, max_tokens: int | None) -> dict[str, float] | None:
    """Median seconds of each stage of a cycle of ``concurrency`` requests halfway through their outputs.

    Each stage is timed alone (a replayed graph on a GPU), so their sum is a little more than a cycle. Only for an
    engine that has not run a request yet; None for a served endpoint.
    """
    llm = opened.llm
    if llm is None:
        return None
    batch = min(concurrency, llm.limits.max_batch_size)
    return llm.profiler.stages(batch, llm.block_size, context=_typical_context(opened, max_tokens))


def write_cycle_table(
    llm: LLM, path: Path, *, batches: Sequence[int], block_sizes: Sequence[int], context: int = _CONTEXT
) -> None:
    """Measure seconds per cycle and write them as ``sweep --predict --cycle-table`` reads them.

    Args:
        llm: an engine that has not run a request yet. batches, block_sizes: the grid. context: cached tokens a request.
    """
    seconds = llm.profiler.table(batches, block_sizes, context=context).seconds
    columns = {str(size): {str(batch): seconds[batch, size] for batch in batches} for size in sorted(set(block_sizes))}
    with written_whole(path) as partial:
        partial.write_text(json.dumps({"context_tokens": context, "cycle_s": columns}, indent=1) + "\n")


def _typical_context(opened: Opened, max_tokens: int | None) -> int:
    lengths = sorted(len(prompt) for prompt in opened.prompts)
    return lengths[len(lengths) // 2] + (max_tokens or _CONTEXT) // 2

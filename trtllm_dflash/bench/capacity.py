"""What a load asks for beyond what serves it: slots, places in the queue, tokens of a sequence.

Such a load is measured all the same (a sweep wants to see where a server is full), but never without a word.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence

from trtllm_dflash.bench.records import RequestRecord
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.serving.client import TritonClient

_TIMEOUT_S = 10.0


def capacity_of(url: str, model: str) -> dict[str, int]:
    """``max_batch_size`` (slots) and ``max_queue`` of a Triton model that ``deploy`` wrote; empty for another model."""
    with contextlib.suppress(DFlashError, ValueError, KeyError, TypeError, AttributeError):
        answer = TritonClient(url, model, timeout_s=_TIMEOUT_S).generate(control="health")
        health = json.loads(str(answer["text_output"]))
        return {"max_batch_size": int(health["limits"]["max_batch_size"]), "max_queue": int(health["max_queue"])}
    return {}


def queueing_warning(facts: Mapping[str, object], concurrencies: Iterable[int]) -> str | None:
    """Which concurrencies are more than ``facts`` (of a configuration) has slots for, and what then happens."""
    slots, queue = facts.get("max_batch_size"), facts.get("max_queue")
    if not isinstance(slots, int):
        return None
    beyond = sorted({users for users in concurrencies if users > slots})
    if not beyond:
        return None
    listed = ", ".join(map(str, beyond))
    text = (
        f"concurrency {listed} is more than the engine's {slots} slots (max_batch_size): {slots} requests run, the "
        "rest wait in the queue, and their waiting is in the time to the first token"
    )
    if isinstance(queue, int) and beyond[-1] > slots + queue:
        text += f"; beyond {slots + queue} requests are refused (max_queue {queue})"
    return text


def left_out_warning(facts: Mapping[str, object]) -> str | None:
    """How many prompts were left out because they and the output do not fit into a sequence."""
    left_out = facts.get("prompts_left_out")
    if not isinstance(left_out, int) or not left_out:
        return None
    return (
        f"{left_out} prompts are left out: with --max-tokens more they are longer than max_seq_len; ask for fewer "
        "tokens, or build with a larger --max-seq-len"
    )


def cut_warning(cut: int, requests: int) -> str | None:
    """How many outputs ended where their ``max_tokens`` had been cut to what the sequence left."""
    if not cut:
        return None
    return (
        f"{cut} of {requests} outputs were cut short of --max-tokens, because the sequence was full (the engine's "
        "max_seq_len)"
    )


def by_label(texts: Iterable[tuple[str, str | None]]) -> list[str]:
    """One line for each different text of (label, text), after the labels that share it."""
    labels: dict[str, list[str]] = {}
    for label, text in texts:
        if text is not None:
            labels.setdefault(text, []).append(label)
    return [f"{', '.join(sharing)}: {text}" for text, sharing in labels.items()]


def cut_short(records: Sequence[RequestRecord]) -> int:
    """Requests whose output was cut at the end of the sequence."""
    return sum(record.is_cut for record in records)

"""Networks of several ranks, computed in lockstep, against the whole model on torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_sessions import Observed, drive, relative_error
from interpreted_session import interpreted_session
from recorded_plugins import recorded
from tensorrt_requests import paged_limits, request_of
from torch import Tensor
from torch_reference import torch_session

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

TOLERANCE = 1e-5


class Ranks:
    """Where ranks meet: every rank brings its tensor, all leave with the joined one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.brought: dict[int, Tensor] = {}
        self.seen: set[str] = set()

    def collective(self, rank: int) -> Callable[[str, str, Tensor], Tensor]:
        def meet(name: str, label: str, tensor: Tensor) -> Tensor:
            self.brought[rank] = tensor
            self.seen.add(label)
            self.barrier.wait()
            parts = [self.brought[index] for index in range(self.count)]
            joined = torch.stack(parts).sum(0) if label == "sum_over_ranks" else torch.cat(parts, 0)
            self.barrier.wait()
            return joined

        return meet


@pytest.mark.parametrize(
    ("pair", "lowering", "count"),
    [
        ("llama-v2", "native", 2),
        ("qwen3-v1", "native", 2),
        ("llama-bias", "native", 2),
        ("llama-v2", "plugin", 2),
        # Twice as many ranks as key/value heads: two ranks hold the same one.
        ("llama-v2", "plugin", 4),
        ("qwen3-v1", "native", 4),
    ],
)
def test_several_ranks_equal_one(
    rtx: TensorRTLibrary,
    tiny_pairs: Callable[[str], Any],
    tiny_request: Any,
    tmp_path: Path,
    pair: str,
    lowering: str,
    count: int,
) -> None:
    directories = tiny_pairs(pair)
    convert(str(directories.target), str(directories.drafter), tmp_path / "checkpoint", tp_size=count)
    source = open_checkpoint(tmp_path / "checkpoint")
    ranks = Ranks(count)
    prompts = [torch.arange(7, 20), torch.arange(40, 44)]
    arguments: dict[str, Any] = {"seed": 2, "temperatures": torch.tensor([0.0, 0.9]), "block_size": 4}
    observed: dict[int, Observed] = {}

    def run(rank: int) -> None:
        request = request_of(
            rtx,
            tmp_path / "checkpoint",
            rank=rank,
            target=source.tensors("target", rank),
            drafter=source.tensors("drafter", rank),
        )
        if lowering == "plugin":
            request = recorded(replace(request, limits=paged_limits(request.limits.block_size)))
        session = interpreted_session(request, collective=ranks.collective(rank))
        observed[rank] = drive(session, prompts, **arguments)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ranks.seen == {"sum_over_ranks", "gather_over_ranks"}
    expected = drive(torch_session(replace(tiny_request(pair))), prompts, **arguments)
    for rank in range(count):
        found = observed[rank]
        assert relative_error(found.prefill_logits, expected.prefill_logits) <= TOLERANCE
        assert relative_error(found.verify_logits, expected.verify_logits) <= TOLERANCE
        assert relative_error(found.verify_features, expected.verify_features) <= TOLERANCE
        assert found.draft is not None
        assert expected.draft is not None
        assert torch.equal(found.draft.draft_tokens, expected.draft.draft_tokens)
        # Chosen among the whole vocabulary's logits: no padding, and nobody's part of it only.
        assert torch.equal(found.draft.candidates, expected.draft.candidates)
        assert relative_error(found.draft.q_rows, expected.draft.q_rows) <= TOLERANCE

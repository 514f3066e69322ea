"""Prefill passes on a GPU: padded, recorded and plain ones give the same logits and the same caches."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_pair import LIMITS, VOCAB, gpu_session

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.cuda_graphs import GraphPool
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.runtime.prefill import PrefillChunk, PrefillRunner
from trtllm_dflash.runtime.request import Request, RequestSpec
from trtllm_dflash.runtime.slots import SamplingMode, SlotState
from trtllm_dflash.runtime.text import TextStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the compiled plugin library"),
]

TOLERANCE = 6e-2
PAGES = 64
GREEDY = SamplingParams(temperature=0.0)


class _Prompts:
    """Requests of random prompts in slots of their own, run chunk by chunk."""

    def __init__(self, kind: str, lengths: list[int], *, graphs: bool, padded: bool = True) -> None:
        self.session = gpu_session(kind, "bfloat16", kernels="plugins")
        self.session.allocate_caches(PAGES)
        self.state = SlotState.of_limits(LIMITS, vocab_size=VOCAB, scratch_page=PAGES, device=self.session.device)
        pool = GraphPool(self.session.device) if graphs else None
        if not padded:
            self.session.uses_kernels = False
        self.runner = PrefillRunner(self.session, self.state, pool)
        self.session.uses_kernels = True
        draw = random.Random(5)
        self.requests = []
        self.logits: list[torch.Tensor] = []
        for slot, length in enumerate(lengths):
            prompt = tuple(draw.randrange(3, 500) for _ in range(length))
            spec = RequestSpec(str(slot), prompt, GREEDY, SamplingMode.of(GREEDY), 20, (), (), 1)
            self.requests.append(
                Request(spec, TextStream(None, (), include_stop=False), print, 8, slot=slot)  # type: ignore[arg-type]
            )
            pages = [slot * 8 + page for page in range(8)]
            self.state.start(slot, prompt, GREEDY, seed=1, max_output_tokens=20, stop_ids=(), bad_words=(), pages=pages)

    @torch.inference_mode()
    def run(self, parts: list[list[tuple[int, int]]]) -> None:
        """Passes of (request, number of tokens)."""
        compute = self.runner._compute

        def kept(chunks: list[PrefillChunk]) -> torch.Tensor:
            logits = compute(chunks)
            self.logits.append(logits[: len(chunks)].clone())
            return logits

        self.runner._compute = kept  # type: ignore[method-assign, assignment]
        for part in parts:
            chunks = [PrefillChunk(self.requests[i], self.requests[i].prefilled, count) for i, count in part]
            self.runner.run(chunks)

    def everything(self) -> list[torch.Tensor]:
        """Logits of all passes, anchors, and what both caches hold of the prompts."""
        rows = torch.cat(
            [torch.arange(len(r.prefill_ids)) + (r.slot or 0) * 8 * LIMITS.page_tokens for r in self.requests]
        ).to(self.session.device)
        caches = (*self.session.target_caches, *self.session.drafter_caches)
        held = [part.flatten(0, 1)[rows] for cache in caches for part in (cache.k, cache.v)]
        return [*self.logits, self.state.anchors[: len(self.requests)], *held]


LENGTHS = [70, 5, 33, 90, 1, 64]
PARTS = [[(0, 40), (1, 5)], [(0, 30), (2, 33), (4, 1)], [(3, 90)], [(5, 64)]]


@pytest.mark.parametrize("kind", ["llama-v1", "llama-v2", "qwen3-v2"])
def test_recorded_passes_equal_those_launched_one_by_one(kind: str) -> None:
    eager, recorded = (_Prompts(kind, LENGTHS, graphs=graphs) for graphs in (False, True))
    with torch.inference_mode():
        recorded.runner.warm_up()
    for prompts in (eager, recorded):
        prompts.run(PARTS)
    for one, other in zip(recorded.everything(), eager.everything(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["llama-v2", "qwen3-v2"])
def test_padding_changes_no_more_than_rounding(kind: str) -> None:
    padded, exact = (_Prompts(kind, LENGTHS, graphs=False, padded=padded) for padded in (True, False))
    for prompts in (padded, exact):
        prompts.run(PARTS)
    for one, other in zip(padded.everything(), exact.everything(), strict=True):
        if one.is_floating_point():
            scale = other.float().abs().max().clamp_min(1e-3)
            assert ((one.float() - other.float()).abs().max() / scale).item() < TOLERANCE


def test_nothing_but_the_prompts_is_written() -> None:
    prompts = _Prompts("llama-v2", [33, 2], graphs=True)
    for cache in (*prompts.session.target_caches, *prompts.session.drafter_caches):
        cache.k.fill_(7.0)
        cache.v.fill_(7.0)
    with torch.inference_mode():
        prompts.runner.warm_up()
    prompts.run([[(0, 33), (1, 2)]])
    for cache in (*prompts.session.target_caches, *prompts.session.drafter_caches):
        for part in (cache.k, cache.v):
            rows = part.flatten(0, 1)
            written = (rows != 7.0).flatten(1).any(1).nonzero().flatten().tolist()
            assert written == [*range(33), *range(8 * LIMITS.page_tokens, 8 * LIMITS.page_tokens + 2)]

"""The attention kernel against its definition in float64, on random and on awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_problem import Case, Problem, random_case
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import find_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the plugin library: trtllm-dflash plugins build"),
]

LONG_CONTEXT = 33_001


@pytest.mark.parametrize("seed", range(240))
def test_random_shapes(seed: int) -> None:
    Problem.draw(random_case(seed)).check()


BLOCK = Case(seed=1, contexts=(100, 37), queries=(8, 8), block=8, causal=False)
PAGED = Case(seed=2, contexts=(100, 37), queries=(8, 8))


@pytest.mark.parametrize("splits", [0, 1, 2, 5])
@pytest.mark.parametrize("base", [BLOCK, PAGED], ids=["block", "paged"])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 4095, 8192, LONG_CONTEXT])
def test_context_lengths(base: Case, context: int, splits: int) -> None:
    Problem.draw(replace(base, contexts=(context, 16), max_splits=splits)).check()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 64, 65])
def test_windows_around_the_block_size(window: int, causal: bool) -> None:
    Problem.draw(replace(BLOCK, contexts=(500, 3), window=window, causal=causal)).check()


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 128, 129, 600])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_prefill_lengths(rows: int, head_dim: int) -> None:
    Problem.draw(replace(PAGED, contexts=(0, 50), queries=(rows, 1), head_dim=head_dim)).check()


def test_large_scores_do_not_overflow() -> None:
    problem = Problem.draw(replace(BLOCK, contexts=(900, 37)))
    problem.q = problem.q * 60
    problem.check()


def test_empty_block_on_empty_context_is_zero() -> None:
    problem = Problem.draw(replace(BLOCK, contexts=(0, 0), block_lengths=(0, 0)))
    assert problem.run().eq(0).all()


def test_agrees_with_the_torch_dialect() -> None:
    from trtllm_dflash.ops import torch_attention
    from trtllm_dflash.ops.interface import CacheLayer

    problem = Problem.draw(replace(BLOCK, contexts=(100, 80), window=90))
    problem.page_table.clamp_(max=problem.k_cache.shape[0] - 1)
    cache = CacheLayer(problem.k_cache.nan_to_num(0.0).float(), problem.v_cache.nan_to_num(0.0).float())
    contexts = torch.tensor(problem.case.contexts, device="cuda")
    lengths = torch.full_like(contexts, problem.case.block)
    plan = torch_attention.plan_block_attention(problem.page_table, contexts, lengths, problem.case.block)
    expected = torch_attention.block_attention(
        plan,
        problem.q.float(),
        problem.k_block.float(),
        problem.v_block.float(),
        cache,
        scale=problem.scale,
        window=90,
        causal=False,
    )
    torch.testing.assert_close(problem.run().float(), expected, atol=2e-2, rtol=2e-2)


def test_one_graph_serves_growing_contexts() -> None:
    from trtllm_dflash.ops import cuda_attention

    problem = Problem.draw(replace(BLOCK, contexts=(3000, 2990), spare_pages=4))
    contexts = torch.tensor((3000, 2990), device="cuda")
    tensors = (problem.q, problem.k_block, problem.v_block, problem.k_cache, problem.v_cache, problem.page_table)

    def run(out: Tensor) -> None:
        cuda_attention.block_attention(*tensors, contexts, None, 8, scale=problem.scale, out=out)

    out = torch.empty_like(problem.q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for lengths in ((3000, 2990), (1, 0), (64, 2000), (2999, 17)):
        contexts.copy_(torch.tensor(lengths, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        expected = torch.empty_like(out)
        run(expected)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("batch", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 96])
@pytest.mark.parametrize("context", [4096, 4090, 4001, 600])
@pytest.mark.parametrize("block", [8, 16])
def test_one_wave_of_splits(batch: int, page_tokens: int, context: int, block: int) -> None:
    """Batches whose splits fill the device once, joined in clusters (short contexts: large ones) or by a second launch;
    whole tiles and ends of tiles."""
    contexts = tuple(max(0, context - 700 * (request % 2) - 3 * request) for request in range(batch))
    case = replace(BLOCK, contexts=contexts, queries=(block,) * batch, block=block, kv_heads=8, page_tokens=page_tokens)
    Problem.draw(case).check()
    Problem.draw(replace(case, block=0, causal=True, settled=True)).check()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("page_tokens", [32, 48])
def test_row_tiles_in_waves(page_tokens: int, window: int | None) -> None:
    """More row tiles than multiprocessors, of any length: whole tiles none to many, ends that need a stage twice."""
    contexts = tuple(37 * request % 1300 for request in range(40))
    case = replace(BLOCK, contexts=contexts, queries=(16,) * 40, block=16, kv_heads=8, page_tokens=page_tokens)
    Problem.draw(replace(case, window=window)).check()
    Problem.draw(replace(case, window=window, block=0, causal=True, settled=True)).check()


def test_a_settled_context_waits_for_queries_and_new_rows() -> None:
    """The launch in front writes the queries and the newest cache rows; only what is older may be read early."""
    from trtllm_dflash.ops import cuda_attention, cuda_fused

    problem = Problem.draw(replace(PAGED, contexts=(3000, 2990), queries=(8, 8), kv_heads=8, spare_pages=4))
    heads, kv_heads, head_dim = problem.q.shape[1], 8, 128
    generator = torch.Generator("cuda").manual_seed(3)
    rotation = torch.cat((torch.ones(4096, head_dim // 2), torch.zeros(4096, head_dim // 2)), dim=-1).cuda()
    contexts = torch.tensor((3000, 2990), device="cuda")
    starts = torch.tensor((0, 8, 16), device="cuda")
    positions = (contexts[:, None] + torch.arange(8, device="cuda")).view(-1)
    pages = problem.page_table[torch.arange(2, device="cuda").repeat_interleave(8), positions // 16]
    slots = pages * 16 + positions % 16
    qkv = torch.empty(16, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(16, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    caches = (problem.k_cache, problem.v_cache)

    def run(*, apart: bool) -> None:
        q = cuda_fused.qk_norm_rope_write(qkv, heads, positions, slots, rotation, None, None, 1e-6, *caches)
        if apart:
            torch.cuda.synchronize()
        cuda_attention.paged_attention(
            q, *caches, problem.page_table, contexts, starts, 8, scale=problem.scale, context_settled=True, out=out
        )

    run(apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run(apart=False)
    for _ in range(20):
        qkv.normal_(generator=generator)
        out.fill_(float("nan"))
        graph.replay()
        found = out.clone()
        run(apart=True)
        assert torch.equal(found, out)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("contexts", [(16384,), (16381,), (8192, 8100), (700,), (1000,) * 20])
def test_calls_behind_one_another(contexts: tuple[int, ...], settled: bool) -> None:
    """Each call's queries are the last one's results: launches that overlap, and blocks that wait beside others, give
    what calls alone give."""
    from trtllm_dflash.ops import cuda_attention

    batch = len(contexts)
    problem = Problem.draw(replace(BLOCK, contexts=contexts, queries=(16,) * batch, block=16, kv_heads=8))
    lengths = torch.tensor(contexts, device="cuda")
    caches = (problem.k_block, problem.v_block, problem.k_cache, problem.v_cache, problem.page_table)

    def run(*, apart: bool) -> Tensor:
        rows = problem.q
        for _ in range(5):
            rows = cuda_attention.block_attention(
                rows, *caches, lengths, None, 16, scale=problem.scale, context_settled=settled
            )
            if apart:
                torch.cuda.synchronize()
        return rows

    expected = run(apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(apart=False)
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


def test_unsupported_shapes_are_refused_by_name() -> None:
    with pytest.raises(EngineError, match="head_dim 112"):
        Problem.draw(replace(BLOCK, head_dim=112)).run()
    with pytest.raises(EngineError, match="page_tokens 24"):
        Problem.draw(replace(BLOCK, page_tokens=24)).run()

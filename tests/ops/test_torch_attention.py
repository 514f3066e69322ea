"""Paged and block attention against loops over single queries and keys in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trtllm_dflash.ops.interface import CacheLayer
from trtllm_dflash.ops.torch_dialect import TorchOps

OPS = TorchOps()
PAGE_TOKENS, HEAD_DIM = 4, 8


@dataclass
class Scene:
    """A cache whose pages are dealt out at random, filled with noise, and scratch that would spoil any result."""

    cache: CacheLayer[Tensor]
    page_table: Tensor
    context_lengths: list[int]

    def row(self, request: int, position: int) -> int:
        page = int(self.page_table[request, position // PAGE_TOKENS])
        return page * PAGE_TOKENS + position % PAGE_TOKENS

    def cached(self, request: int, position: int, head: int) -> tuple[Tensor, Tensor]:
        page, offset = divmod(self.row(request, position), PAGE_TOKENS)
        return self.cache.k[page, offset, head].double(), self.cache.v[page, offset, head].double()


def _scene(context_lengths: list[int], longest: int, kv_heads: int, generator: torch.Generator) -> Scene:
    columns = -(-longest // PAGE_TOKENS)
    batch = len(context_lengths)
    pages = batch * columns
    order = torch.randperm(pages, generator=generator).view(batch, columns)
    shape = (pages + 1, PAGE_TOKENS, kv_heads, HEAD_DIM)
    cache = CacheLayer(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    cache.k[-1], cache.v[-1] = 1e4, 1e4
    return Scene(cache, order, context_lengths)


def _attend(query: Tensor, keys: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    weights = torch.softmax(torch.stack([key for key, _ in keys]) @ query.double() * scale, dim=0)
    return weights @ torch.stack([value for _, value in keys])


# The last row is long enough for the form that does not stack the query heads of a group.
QUERIES = {"ragged": [7, 1, 4, 2], "uniform": [3, 3, 3, 3], "long": [70, 1, 2, 66]}


@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_paged_attention(window: int | None, queries: list[int], heads: int, kv_heads: int) -> None:
    uniform = len(set(queries)) == 1
    generator = torch.Generator().manual_seed(sum(queries) + heads)
    contexts = [0, 5, 8, 13]
    scene = _scene(contexts, max(c + q for c, q in zip(contexts, queries, strict=True)), kv_heads, generator)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    total = sum(queries)
    q = torch.randn(total, heads, HEAD_DIM, generator=generator)
    plan = OPS.plan_attention(
        scene.page_table,
        torch.tensor(contexts),
        starts,
        max(queries),
        queries_per_request=3 if uniform else None,
        total_queries=total,
    )
    found = OPS.paged_attention(plan, q, scene.cache, scale=0.3, window=window)
    row = 0
    for request, (context, count) in enumerate(zip(contexts, queries, strict=True)):
        for query in range(count):
            position = context + query
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                keys = [scene.cached(request, key, head // (heads // kv_heads)) for key in range(first, position + 1)]
                torch.testing.assert_close(
                    found[row, head].double(), _attend(q[row, head], keys, 0.3), atol=1e-5, rtol=0
                )
            row += 1
    assert row == total


def _visible(query: int, key: int, window: int | None, causal: bool) -> bool:
    """The reference's mask (``dflash`` 0.1.0 ``_attention_mask``)."""
    if causal and key > query:
        return False
    return window is None or abs(query - key) <= window - 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9, 100])
def test_block_attention(window: int | None, causal: bool) -> None:
    generator = torch.Generator().manual_seed(17)
    contexts, lengths, block_size, heads, kv_heads = [0, 1, 7, 12], [5, 2, 5, 1], 5, 4, 2
    scene = _scene(contexts, 16, kv_heads, generator)
    q = torch.randn(20, heads, HEAD_DIM, generator=generator)
    k, v = (torch.randn(20, kv_heads, HEAD_DIM, generator=generator) for _ in range(2))
    before = scene.cache.k.clone(), scene.cache.v.clone()
    plan = OPS.plan_block_attention(scene.page_table, torch.tensor(contexts), torch.tensor(lengths), block_size)
    found = OPS.block_attention(plan, q, k, v, scene.cache, scale=0.3, window=window, causal=causal)
    for request, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        for row in range(length):
            for head in range(heads):
                kv_head = head // 2
                keys = [
                    scene.cached(request, key, kv_head)
                    for key in range(context)
                    if _visible(context + row, key, window, causal)
                ]
                keys += [
                    (k[request * 5 + other, kv_head].double(), v[request * 5 + other, kv_head].double())
                    for other in range(length)
                    if _visible(row, other, window, causal)
                ]
                result = found[request * 5 + row, head].double()
                torch.testing.assert_close(result, _attend(q[request * 5 + row, head], keys, 0.3), atol=1e-5, rtol=0)
    assert torch.equal(scene.cache.k, before[0])
    assert torch.equal(scene.cache.v, before[1])


def test_padded_block_rows_are_seen_by_nobody() -> None:
    """NaN in the rows beyond a block's length may spoil those rows only."""
    generator = torch.Generator().manual_seed(3)
    scene = _scene([6], 8, 2, generator)
    q, k, v = (torch.randn(4, 2, HEAD_DIM, generator=generator) for _ in range(3))
    plan = OPS.plan_block_attention(scene.page_table, torch.tensor([6]), torch.tensor([2]), 4)
    clean = OPS.block_attention(plan, q, k, v, scene.cache, scale=0.3, window=None, causal=False)
    k[2:], v[2:] = 77.0, -50.0
    other = OPS.block_attention(plan, q, k, v, scene.cache, scale=0.3, window=None, causal=False)
    assert torch.equal(clean[:2], other[:2])


@pytest.mark.parametrize("seed", range(5))
def test_write_kv(seed: int) -> None:
    """Rows go to their slots; -1 is dropped, and page 0 is nobody's waste basket."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (6, PAGE_TOKENS, 2, HEAD_DIM)
    cache = CacheLayer(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    before_k, before_v = cache.k.clone(), cache.v.clone()
    slots = draw.sample(range(5 * PAGE_TOKENS), 9)
    for place in draw.sample(range(9), 4):
        slots[place] = -1
    k, v = (torch.randn(9, 2, HEAD_DIM, generator=generator) for _ in range(2))
    OPS.write_kv(cache, k, v, torch.tensor(slots))
    for flat in range(5 * PAGE_TOKENS):
        page, offset = divmod(flat, PAGE_TOKENS)
        wanted_k, wanted_v = before_k[page, offset], before_v[page, offset]
        if flat in slots:
            wanted_k, wanted_v = k[slots.index(flat)], v[slots.index(flat)]
        assert torch.equal(cache.k[page, offset], wanted_k)
        assert torch.equal(cache.v[page, offset], wanted_v)


def test_dropped_nan_does_not_reach_the_scratch_page() -> None:
    """Padded page tables gather the scratch page, and no mask hides NaN."""
    cache = CacheLayer(torch.zeros(3, PAGE_TOKENS, 1, HEAD_DIM), torch.zeros(3, PAGE_TOKENS, 1, HEAD_DIM))
    rows = torch.full((2, 1, HEAD_DIM), float("nan"))
    OPS.write_kv(cache, rows, rows, torch.tensor([-1, -1]))
    assert bool(torch.isfinite(cache.k).all())
    assert bool(torch.isfinite(cache.v).all())

"""Attention calls drawn at random and their definition in float64, on a CUDA GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One attention call. ``block`` > 0: block mode with that S; else paged mode with ragged ``queries``."""

    seed: int
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    block: int = 0
    block_lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    float8: bool = False
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_tokens: int = 16
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    max_splits: int = 0
    settled: bool = False
    index_dtype: torch.dtype = torch.int64
    spare_pages: int = 0
    strided_q: bool = False


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    batch = rng.randint(1, 6)
    page_tokens = rng.choice((16, 16, 32, 48, 64, 80, 128))
    block = rng.choice((0, rng.randint(1, 16)))
    edges = (0, 1, 15, 16, 17, 63, 64, 65, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens, 127, 129)
    contexts = tuple(rng.choice((rng.choice(edges), rng.randint(0, 700))) for _ in range(batch))
    if rng.random() < 0.1:
        contexts = (rng.randint(3000, 6000), *contexts[1:])
    most = rng.choice((1, 16, 40, 150))
    queries = tuple(block or rng.randint(0, most) for _ in range(batch))
    if sum(queries) == 0:
        queries = (1, *queries[1:])
    size = block or max(queries)
    windows = (None, None, 1, 2, max(1, size - 1), size, size + 1, 64, 100, 500)
    return Case(
        seed=seed,
        contexts=contexts,
        queries=queries,
        block=block,
        block_lengths=tuple(rng.randint(0, block) for _ in range(batch)) if block and rng.random() < 0.5 else None,
        dtype=rng.choice((torch.bfloat16, torch.float16)),
        float8=rng.random() < 0.3,
        kv_heads=rng.choice((1, 2, 3, 8)),
        group=rng.choice((1, 2, 3, 4, 5, 7, 8, 16)),
        head_dim=rng.choice((64, 80, 96, 128, 128, 256)),
        page_tokens=page_tokens,
        causal=not block or rng.random() < 0.3,
        window=rng.choice(windows),
        softcap=rng.choice((None, None, 20.0)),
        sinks=rng.random() < 0.3,
        max_splits=rng.choice((0, 1, 2, 3, 7)),
        index_dtype=rng.choice((torch.int64, torch.int32)),
        spare_pages=rng.choice((0, 3, 200)),
        strided_q=rng.random() < 0.3,
        settled=rng.random() < 0.5,
    )


@dataclass
class Problem:
    """Tensors of a case. Everything a kernel must not read is NaN, or a page number far outside the cache."""

    case: Case
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_block: Tensor | None
    v_block: Tensor | None
    page_table: Tensor
    sinks: Tensor | None
    k_scale: float
    v_scale: float

    @classmethod
    def draw(cls, case: Case) -> Problem:
        generator = torch.Generator("cuda").manual_seed(case.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        heads, batch = case.kv_heads * case.group, len(case.contexts)
        cached = [c if case.block else c + n for c, n in zip(case.contexts, case.queries, strict=True)]
        used = [-(-rows // case.page_tokens) for rows in cached]
        columns = max(max(used) + case.spare_pages, 1)
        order = torch.randperm(sum(used) + 2, generator=generator, device="cuda").tolist()
        page_table = torch.full((batch, columns), 1 << 28, dtype=case.index_dtype, device="cuda")
        cache_dtype = FLOAT8 if case.float8 else case.dtype
        shape = (sum(used) + 3, case.page_tokens, case.kv_heads, case.head_dim)
        k_cache = torch.full(shape, float("nan"), device="cuda").to(cache_dtype)
        v_cache = k_cache.clone()
        k_scale, v_scale = (0.5, 0.25) if case.float8 else (1.0, 1.0)
        for request, rows in enumerate(cached):
            first = case.contexts[request] - case.window + 1 if case.window is not None else 0
            for page in range(used[request]):
                begin, end = page * case.page_tokens, min((page + 1) * case.page_tokens, rows)
                # Pages that every query's window has left may have been given to another request.
                if end <= first:
                    order.pop()
                    continue
                physical = order.pop()
                page_table[request, page] = physical
                row = (end - begin, case.kv_heads, case.head_dim)
                k_cache[physical, : end - begin] = (normal(*row) / k_scale).to(cache_dtype)
                v_cache[physical, : end - begin] = (normal(*row) / v_scale).to(cache_dtype)
        total = sum(case.queries)
        wide = 3 * heads if case.strided_q else heads
        q = (normal(total, wide, case.head_dim) * 1.5).to(case.dtype)[:, :heads]
        block_rows = (total, case.kv_heads, case.head_dim)
        return cls(
            case=case,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k_block=normal(*block_rows).to(case.dtype) if case.block else None,
            v_block=normal(*block_rows).to(case.dtype) if case.block else None,
            page_table=page_table,
            sinks=normal(heads) if case.sinks else None,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5

    def run(self) -> Tensor:
        from trtllm_dflash.ops import cuda_attention

        case = self.case
        # A strided output shows that rows are written where they belong and nowhere else.
        room = torch.full((self.q.shape[0], 2 * self.q.shape[1], case.head_dim), float("nan"), device="cuda")
        room = room.to(case.dtype)
        out = room[:, : self.q.shape[1]]
        contexts = torch.tensor(case.contexts, dtype=case.index_dtype, device="cuda")
        options = {
            "scale": self.scale,
            "window": case.window,
            "causal": case.causal,
            "softcap": case.softcap,
            "sinks": self.sinks,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "max_splits": case.max_splits,
            "context_settled": case.settled,
            "out": out,
        }
        if case.block:
            lengths = None
            if case.block_lengths is not None:
                lengths = torch.tensor(case.block_lengths, dtype=case.index_dtype, device="cuda")
            cuda_attention.block_attention(
                self.q,
                self.k_block,
                self.v_block,
                self.k_cache,
                self.v_cache,
                self.page_table,
                contexts,
                lengths,
                case.block,
                **options,
            )
        else:
            starts = torch.tensor((0, *case.queries), device="cuda").cumsum(0).to(case.index_dtype)
            cuda_attention.paged_attention(
                self.q,
                self.k_cache,
                self.v_cache,
                self.page_table,
                contexts,
                starts,
                max(case.queries),
                **options,
            )
        torch.cuda.synchronize()
        assert room[:, self.q.shape[1] :].isnan().all()
        return out

    def definition(self) -> tuple[Tensor, Tensor]:
        """Float64 result and, for the tolerance, ``sum p |v|``; both ``[T, heads, head_dim]``."""
        outs, sizes, first = [], [], 0
        for request, queries in enumerate(self.case.queries):
            out, size = self._request(request, self.q[first : first + queries].double(), first)
            outs.append(out)
            sizes.append(size)
            first += queries
        return torch.cat(outs), torch.cat(sizes)

    def _request(self, request: int, q: Tensor, first: int) -> tuple[Tensor, Tensor]:
        case, context = self.case, self.case.contexts[request]
        cached = context if case.block else context + q.shape[0]
        low = max(0, context - case.window + 1) if case.window is not None else 0
        rows = torch.arange(low, cached, device="cuda")
        slots = self.page_table[request].long()[rows // case.page_tokens] * case.page_tokens + rows % case.page_tokens
        keys = self.k_cache.view(-1, *self.k_cache.shape[2:])[slots].double() * self.k_scale
        values = self.v_cache.view(-1, *self.v_cache.shape[2:])[slots].double() * self.v_scale
        positions = rows
        if case.block:
            length = case.block if case.block_lengths is None else case.block_lengths[request]
            block = slice(first, first + length)
            keys = torch.cat((keys, self._as_cached(self.k_block[block], self.k_scale)))
            values = torch.cat((values, self._as_cached(self.v_block[block], self.v_scale)))
            positions = torch.cat((rows, torch.arange(context, context + length, device="cuda")))
        distance = (context + torch.arange(q.shape[0], device="cuda"))[:, None] - positions
        visible = torch.ones_like(distance, dtype=torch.bool)
        if case.causal:
            visible &= distance >= 0
        if case.window is not None:
            visible &= distance.abs() < case.window
        keys, values = keys.repeat_interleave(case.group, 1), values.repeat_interleave(case.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : positions.shape[0]]
        return (
            torch.einsum("hqk,khd->qhd", weights, values),
            torch.einsum("hqk,khd->qhd", weights, values.abs()),
        )

    def _as_cached(self, rows: Tensor, scale: float) -> Tensor:
        return (rows.float() / scale).to(FLOAT8).double() * scale if self.case.float8 else rows.double()

    def check(self) -> None:
        out = self.run().double()
        expected, size = self.definition()
        # The result is rounded once; each weight is rounded once before it meets its value. Half weights that are
        # far below the largest lose up to 2^-25 of it each.
        epsilon = torch.finfo(self.case.dtype).eps / 2
        tolerance = epsilon * (expected.abs() + 1.1 * size) + 2e-4 * size + 1e-6
        if self.case.dtype == torch.float16 or self.case.float8:
            tolerance += max(self.case.contexts) * 2.0**-25
        if self.case.block_lengths is not None:
            # Rows of the block beyond its length may hold anything finite.
            assert out.isfinite().all()
            exists = torch.arange(self.case.block, device="cuda") < torch.tensor(
                self.case.block_lengths, device="cuda"
            ).unsqueeze(1)
            exists = exists.reshape(-1)
            out, expected, tolerance = out[exists], expected[exists], tolerance[exists]
        excess = ((out - expected).abs() - tolerance).nan_to_num(float("inf"))
        assert excess.numel() == 0 or excess.max() <= 0, f"{self.case}: {excess.max():.3g} beyond tolerance"

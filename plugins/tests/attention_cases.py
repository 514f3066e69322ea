"""Cases of DFlashPagedAttention and DFlashKVInjection: everything that reads or writes a paged cache.

Expected values are the torch definitions (``ops/torch_attention.py``, ``ops/torch_dense.py``) in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from case_file import EPS, FLOAT8, NO_MEANING, Case, Draw, Fields, rounding
from torch import Tensor

from trtllm_dflash.ops import torch_attention, torch_dense
from trtllm_dflash.ops.interface import CacheLayer


def as_cached(rows: Tensor, cache_dtype: torch.dtype, scale: float) -> Tensor:
    """``rows`` as the cache holds them, in real units, float32."""
    if cache_dtype == FLOAT8:
        return (rows.float() / scale).clamp(-448, 448).to(FLOAT8).float() * scale
    return rows.to(cache_dtype).float()


def rotation_table(rows: int, rotary_dim: int) -> Tensor:
    """``[rows, rotary_dim]`` float32, cos half then sin half."""
    angles = torch.arange(rows).double()[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def normed_and_rotated(
    x: Tensor, weight: Tensor | None, table: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """``x [N, heads, D]`` normed and rotated in float32, not rounded in between, and the size of its terms."""
    x = x.float()
    if weight is not None:
        x = torch_dense.rms_norm(x, weight.float(), EPS)
    if table is None:
        return x, x.abs()
    rows = torch_dense.rotary_rows(table, positions)
    turned = torch_dense.rotary(x, rows)
    half = rows.rotary_dim // 2
    size = x.abs()
    rolled = size[..., : 2 * half].roll(half, dims=-1)
    return turned, torch.cat((size[..., : 2 * half] + rolled, size[..., 2 * half :]), dim=-1)


def written(case: Case, name: str, cache: Tensor, slots: Tensor, rows: Tensor, size: Tensor, scale: float) -> Tensor:
    """Expect ``cache`` with ``rows`` at ``slots``, everything else untouched; returns it in real units, float32."""
    flat = cache.float().view(-1, *cache.shape[2:]).clone()
    tolerance = torch.zeros(flat.shape, dtype=torch.float64)
    kept = slots >= 0
    stored = (rows / scale)[kept]
    if cache.dtype == FLOAT8:
        stored = stored.clamp(-448, 448)
        bound = stored.double().abs() * 2.0**-4 + 2.0**-10
    else:
        bound = stored.double().abs() * rounding(cache.dtype)
    flat[slots[kept]] = stored
    tolerance[slots[kept]] = bound + 1e-5 * (size / scale)[kept].double() + 1e-5
    alias = f"{name[0]}_cache{name.removeprefix('k_cache_out').removeprefix('v_cache_out')}"
    case.expect(name, flat.view(cache.shape), tolerance.view(cache.shape), cache.dtype, alias)
    rounded = flat.to(cache.dtype).float() if cache.dtype != FLOAT8 else flat.clamp(-448, 448).to(FLOAT8).float()
    return rounded.view(cache.shape) * scale


@dataclass
class Paged:
    """A shuffled paged cache of ``contexts`` rows per request with ``room`` rows behind them."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    page_tokens: int

    @classmethod
    def draw(
        cls, draw: Draw, contexts: list[int], room: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float
    ) -> Paged:
        """Values of the cache are real / ``scale``; the last page is the scratch page."""
        page_tokens = 16
        columns = -(-(max(contexts) + room) // page_tokens)
        pages = len(contexts) * columns
        shape = (pages + 1, page_tokens, kv_heads, head_dim)
        k, v = ((draw.normal(*shape) / scale).clamp(-448, 448).to(dtype) for _ in range(2))
        return cls(k, v, draw.order(pages).view(len(contexts), columns), page_tokens)

    def slots(self, request: int, positions: Tensor) -> Tensor:
        """Flat slots of ``positions`` of ``request``."""
        return self.page_table[request][positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens


@dataclass(frozen=True)
class Heads:
    """A paged or block case: requests, heads, types and the fields that vary."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    index: torch.dtype = torch.int64
    window: int | None = None
    kv_scale: float = 1.0


def attention_tolerance(out: Tensor, size: Tensor, dtype: torch.dtype, longest: int) -> Tensor:
    """The result and each weight are rounded once; ``size`` is ``sum p |v|``."""
    small = longest * 2.0**-25
    return rounding(dtype) * (out.abs() + 1.1 * size).double() + 2e-4 * size.double() + 1e-6 + small


def attend_paged(case: Case, h: Heads, q: Tensor, k: Tensor, v: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """The torch definition in float32 on real-valued caches: result and ``sum p |v|``."""
    starts = torch.tensor((0, *h.queries)).cumsum(0)
    plan = torch_attention.plan_attention(
        page_table, torch.tensor(h.contexts), starts, max(h.queries), None, int(starts[-1])
    )
    options = {"scale": h.head_dim**-0.5, "window": h.window}
    return (
        torch_attention.paged_attention(plan, q, CacheLayer(k, v), **options),
        torch_attention.paged_attention(plan, q, CacheLayer(k, v.abs()), **options),
    )


def paged_case(
    name: str, seed: int, h: Heads, *, sinks: bool = False, extent: bool = False, max_query: int = 0
) -> Case:
    """Attention over rows that are already in the cache."""
    draw = Draw(seed)
    total = sum(h.queries)
    pool = Paged.draw(draw, list(h.contexts), max(h.queries), h.kv_heads, h.head_dim, h.cache_dtype, h.kv_scale)
    q = draw.normal(total, h.heads, h.head_dim, dtype=h.dtype, scale=1.5)
    starts = torch.tensor((0, *h.queries)).cumsum(0)
    fields = _attention_fields(h)
    inputs = {"q": q} | _cache_inputs(h, pool)
    inputs["query_starts"] = starts.to(h.index)
    case = Case(name, "DFlashPagedAttention", fields, inputs)
    k, v = pool.k.float() * h.kv_scale, pool.v.float() * h.kv_scale
    out, size = attend_paged(case, h, q.float(), k, v, pool.page_table)
    if sinks:
        # A sink takes its share of each softmax: out = out * Z / (Z + exp(sink)), with Z from the dense scores.
        logits = draw.normal(h.heads)
        inputs["sinks"] = logits
        fields["sinks"] = 1
        share = _share_beside_sinks(h, q.float(), k, pool, logits)
        out, size = out * share, size * share
    if extent:
        inputs["query_extent"] = torch.zeros(max(h.queries), dtype=h.index)
        fields["query_extent"] = 1
    if max_query:
        fields["max_query"] = max_query
    case.expect("out", out, attention_tolerance(out, size, h.dtype, max(h.contexts) + max(h.queries)), h.dtype)
    return case


def _share_beside_sinks(h: Heads, q: Tensor, k: Tensor, pool: Paged, sinks: Tensor) -> Tensor:
    """``Z / (Z + exp(sink))`` per query and head, ``[T, heads, 1]``."""
    shares, first = [], 0
    for request, (context, queries) in enumerate(zip(h.contexts, h.queries, strict=True)):
        keys = k.view(-1, h.kv_heads, h.head_dim)[pool.slots(request, torch.arange(context + queries))]
        keys = keys.repeat_interleave(h.heads // h.kv_heads, 1)
        scores = torch.einsum("qhd,khd->qhk", q[first : first + queries], keys) * h.head_dim**-0.5
        distance = context + torch.arange(queries)[:, None] - torch.arange(context + queries)
        hidden = (distance < 0) if h.window is None else (distance < 0) | (distance >= h.window)
        z = scores.masked_fill(hidden[:, None], float("-inf")).logsumexp(-1)
        shares.append(torch.sigmoid(z - sinks).unsqueeze(-1))
        first += queries
    return torch.cat(shares)


def write_case(name: str, seed: int, h: Heads, *, qk_norm: bool, rotary_dim: int) -> Case:
    """QK norm, rotation and cache write, then attention; two padding rows at the end belong to no request."""
    draw = Draw(seed)
    padding, total = 2, sum(h.queries)
    pool = Paged.draw(draw, list(h.contexts), max(h.queries), h.kv_heads, h.head_dim, h.cache_dtype, h.kv_scale)
    qkv = draw.normal(total + padding, (h.heads + 2 * h.kv_heads) * h.head_dim, dtype=h.dtype)
    positions = [context + torch.arange(n) for context, n in zip(h.contexts, h.queries, strict=True)]
    slots = torch.cat([pool.slots(request, own) for request, own in enumerate(positions)])
    slots = torch.cat((slots, torch.full((padding,), -1)))
    places = torch.cat((*positions, torch.zeros(padding, dtype=torch.int64)))
    starts = torch.tensor((0, *h.queries)).cumsum(0)
    fields = _attention_fields(h) | {"write_kv": 1}
    inputs = {"qkv": qkv} | _cache_inputs(h, pool)
    inputs |= {"query_starts": starts.to(h.index), "slots": slots.to(h.index)}
    table = q_weight = k_weight = None
    if rotary_dim:
        table = rotation_table(int(places.max()) + 1, rotary_dim)
        inputs |= {"positions": places.to(h.index), "cos_sin": table}
        fields["rotary_dim"] = rotary_dim
    if qk_norm:
        q_weight, k_weight = (1 + draw.normal(h.head_dim, scale=0.3) for _ in range(2))
        q_weight, k_weight = q_weight.to(h.dtype), k_weight.to(h.dtype)
        inputs |= {"q_norm_weight": q_weight, "k_norm_weight": k_weight}
        fields |= {"qk_norm": 1, "eps": EPS}
    case = Case(name, "DFlashPagedAttention", fields, inputs)
    split = qkv.view(total + padding, -1, h.head_dim).split((h.heads, h.kv_heads, h.kv_heads), dim=1)
    q, _ = normed_and_rotated(split[0], q_weight, table, places)
    k_rows, k_size = normed_and_rotated(split[1], k_weight, table, places)
    v_rows = split[2].float()
    # Output order is out, K, V: out is expected first and filled in below.
    case.outputs["out"] = (torch.empty(0), torch.empty(0), h.dtype)
    k = written(case, "k_cache_out", pool.k, slots, k_rows, k_size, h.kv_scale)
    v = written(case, "v_cache_out", pool.v, slots, v_rows, v_rows.abs(), h.kv_scale)
    rounded_q = q[:total].to(h.dtype).float()
    out, size = attend_paged(case, h, rounded_q, k, v, pool.page_table)
    # A rotated q or k that the kernel rounds to the neighbour moves a score by up to `drift`, and p by that factor.
    epsilon = 2 * rounding(h.dtype) + (2 * 2.0**-4 if h.cache_dtype == FLOAT8 else 0)
    drift = 0.25 * epsilon * float((rounded_q.norm(dim=-1).max() * k_rows.norm(dim=-1).max()) * h.head_dim**-0.5)
    tolerance = attention_tolerance(out, size, h.dtype, max(h.contexts) + max(h.queries)) + drift * size.double()
    meaningless = torch.full((padding, h.heads, h.head_dim), NO_MEANING, dtype=torch.float64)
    case.expect("out", torch.cat((out, torch.zeros_like(out[:padding]))), torch.cat((tolerance, meaningless)), h.dtype)
    return case


def block_case(
    name: str,
    seed: int,
    h: Heads,
    block: int,
    lengths: list[int],
    *,
    causal: bool,
    fields: dict[str, int] | None = None,
) -> Case:
    """The drafter's block over cached context and its own K/V."""
    draw = Draw(seed)
    batch = len(h.contexts)
    pool = Paged.draw(draw, list(h.contexts), 1, h.kv_heads, h.head_dim, h.cache_dtype, h.kv_scale)
    q = draw.normal(batch * block, h.heads, h.head_dim, dtype=h.dtype, scale=1.5)
    k_block, v_block = (draw.normal(batch * block, h.kv_heads, h.head_dim, dtype=h.dtype) for _ in range(2))
    inputs = {"q": q, "k_block": k_block, "v_block": v_block} | _cache_inputs(h, pool)
    inputs["block_lengths"] = torch.tensor(lengths, dtype=h.index)
    all_fields = _attention_fields(h) | {"block_size": block, "causal": int(causal)} | (fields or {})
    case = Case(name, "DFlashPagedAttention", all_fields, inputs)
    plan = torch_attention.plan_block_attention(pool.page_table, torch.tensor(h.contexts), torch.tensor(lengths), block)
    k, v = pool.k.float() * h.kv_scale, pool.v.float() * h.kv_scale
    own_k = as_cached(k_block, h.cache_dtype, h.kv_scale)
    own_v = as_cached(v_block, h.cache_dtype, h.kv_scale)
    out, size = (
        torch_attention.block_attention(
            plan,
            q.float(),
            own_k,
            own_value,
            CacheLayer(k, value),
            scale=h.head_dim**-0.5,
            window=h.window,
            causal=causal,
        )
        for own_value, value in ((own_v, v), (own_v.abs(), v.abs()))
    )
    tolerance = attention_tolerance(out, size, h.dtype, max(h.contexts) + block)
    exists = (torch.arange(block) < torch.tensor(lengths)[:, None]).view(-1, 1, 1)
    case.expect("out", torch.where(exists, out, 0.0), torch.where(exists, tolerance, NO_MEANING), h.dtype)
    return case


def _attention_fields(h: Heads) -> Fields:
    fields: Fields = {
        "num_heads": h.heads,
        "num_kv_heads": h.kv_heads,
        "head_dim": h.head_dim,
        "scale": h.head_dim**-0.5,
    }
    if h.window is not None:
        fields["window"] = h.window
    if h.kv_scale != 1.0:
        fields |= {"k_scale": h.kv_scale, "v_scale": h.kv_scale}
    return fields


def _cache_inputs(h: Heads, pool: Paged) -> dict[str, Tensor]:
    return {
        "k_cache": pool.k,
        "v_cache": pool.v,
        "page_table": pool.page_table.to(h.index),
        "context_lengths": torch.tensor(h.contexts, dtype=h.index),
    }


def injection_case(
    name: str, seed: int, *, layers: int, dtype: torch.dtype, cache_dtype: torch.dtype, rotary_dim: int, norm: bool
) -> Case:
    """K/V of ``layers`` layers into their caches, a third of the rows dropped."""
    draw = Draw(seed)
    rows, kv_heads, head_dim, pages = 21, 2, 128, 4
    kv = draw.normal(rows, layers, 2, kv_heads, head_dim, dtype=dtype)
    slots = draw.order(pages * 16)[:rows]
    slots[::3] = -1
    positions = draw.order(200)[:rows]
    fields: Fields = {"layers": layers, "num_kv_heads": kv_heads, "head_dim": head_dim}
    inputs = {"kv": kv.view(rows, -1), "slots": slots}
    table = weight = None
    if rotary_dim:
        table = rotation_table(200, rotary_dim)
        inputs |= {"positions": positions, "cos_sin": table}
        fields["rotary_dim"] = rotary_dim
    if norm:
        weight = (1 + draw.normal(layers, head_dim, scale=0.3)).to(dtype)
        inputs["k_norm_weight"] = weight
        fields |= {"k_norm": 1, "eps": EPS}
    scales = [0.05 * (layer + 1) for layer in range(layers)] if cache_dtype == FLOAT8 else [1.0] * layers
    if cache_dtype == FLOAT8:
        fields |= {"k_scales": scales, "v_scales": scales}
    case = Case(name, "DFlashKVInjection", fields, inputs)
    for layer in range(layers):
        for side in "kv":
            inputs[f"{side}_cache_{layer}"] = draw.normal(pages + 1, 16, kv_heads, head_dim).to(cache_dtype)
    for layer in range(layers):
        k, size = normed_and_rotated(kv[:, layer, 0], None if weight is None else weight[layer], table, positions)
        v = kv[:, layer, 1].float()
        written(case, f"k_cache_out_{layer}", inputs[f"k_cache_{layer}"], slots, k, size, scales[layer])
        written(case, f"v_cache_out_{layer}", inputs[f"v_cache_{layer}"], slots, v, v.abs(), scales[layer])
    return case

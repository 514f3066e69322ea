"""Cases of DFlashGroupedConv, DFlashCandidates and DFlashSelectorWalk.

Expected values are the torch definitions (``ops/torch_select.py``), in float64 where sums are long.
"""

from __future__ import annotations

import torch
from case_file import EPS, Case, Draw, Fields, rounding

from trtllm_dflash.ops import torch_dense, torch_select
from trtllm_dflash.runtime.random_streams import WALK_WORD, uniforms


def conv_case(name: str, seed: int, dtype: torch.dtype, *, residual: bool, norm: bool, second_half: bool) -> Case:
    """Grouped dynamic convolution; ``second_half`` reads the deltas from the middle of a wider projection."""
    draw = Draw(seed)
    block, batch, width, groups, taps = 8, 3, 256, 32, 3
    side = taps * groups
    x = draw.normal(batch * block, width, dtype=dtype)
    dynamic = draw.normal(batch * block, 2 * side, dtype=dtype)
    base = draw.normal(taps, width, dtype=dtype)
    first = side if second_half else 0
    fields: Fields = {"block_size": block, "groups": groups, "taps": taps}
    if second_half:
        fields["first_column"] = first
    inputs = {"x": x, "dynamic": dynamic, "base": base}
    case = Case(name, "DFlashGroupedConv", fields, inputs)
    taken = dynamic[:, first : first + side]
    out = torch_select.grouped_dynamic_conv(x.double(), taken.double(), base.double(), block)
    size = torch_select.grouped_dynamic_conv(x.double().abs(), taken.double().abs(), base.double().abs(), block)
    if not residual:
        case.expect("out", out, 2 * rounding(dtype) * out.abs() + 2e-6 * size + 2.0**-24, dtype)
        return case
    inputs["residual"] = draw.normal(batch * block, width)
    fields["residual"] = 1
    total = inputs["residual"].double() + out
    error = 2e-6 * (size + inputs["residual"].double().abs())
    if norm:
        weight = (1 + draw.normal(width, scale=0.3)).to(dtype)
        inputs["norm_weight"] = weight
        fields |= {"norm": 1, "eps": EPS}
        factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        normed = torch_dense.rms_norm(total, weight.double(), EPS)
        bound = 4 * rounding(dtype) * normed.abs() + 5 * error * factor.abs() + 2.0**-23
        case.expect("out", normed, bound, dtype)
    case.expect("residual_out", total, error, torch.float32, "residual")
    return case


def candidates_case(
    name: str, seed: int, dtype: torch.dtype, *, valid: int, offset: int, multiplier: float, softcap: float
) -> Case:
    """Top candidates of rows with many ties."""
    draw = Draw(seed)
    rows, columns, count = 7, 9000, 16
    logits = (draw.normal(rows, columns, scale=3.0) * 8).round().div(8).to(dtype)
    fields: Fields = {"count": count, "valid_columns": valid, "id_offset": offset}
    shown = logits.float()[:, :valid]
    if multiplier != 1.0 or softcap:
        fields |= {"multiplier": multiplier, "softcap": softcap}
        shown = torch.tanh(shown.double() * multiplier / softcap) * softcap
    values, ids = torch_select.top_k(shown, count)
    case = Case(name, "DFlashCandidates", fields, {"logits": logits})
    case.expect("values", values, 0.0 if not softcap else 1e-6 * values.double().abs() + 1e-6, torch.float32)
    case.expect("ids", ids + offset, 0.0, torch.int64)
    return case


def walk_case(name: str, first_seed: int, dtype: torch.dtype, *, seeded: bool) -> Case:
    """A walk whose choices all have room, so that float32 sums in another order cannot change them."""
    for seed in range(first_seed, first_seed + 1000):
        case = _walk(name, Draw(seed), dtype, seeded)
        if case is not None:
            return case
    raise RuntimeError(f"{name}: no walk with room was found")


def _walk(name: str, draw: Draw, dtype: torch.dtype, seeded: bool) -> Case | None:
    batch, positions, count, rank, vocabulary = 3, 7, 16, 64, 300
    candidates = torch.stack([draw.order(vocabulary)[:count] for _ in range(batch * positions)])
    inputs = {
        "unary": draw.normal(batch, positions, count, scale=2.0),
        "candidates": candidates.view(batch, positions, count),
        "hidden": draw.normal(batch, positions, rank, dtype=dtype),
        "predecessor_codebook": draw.normal(vocabulary, rank, dtype=dtype, scale=rank**-0.25),
        "successor_codebook": draw.normal(vocabulary, rank, dtype=dtype, scale=rank**-0.25),
        "anchors": draw.order(vocabulary)[:batch],
        "temperatures": torch.tensor([0.0, 0.8, 1.5]),
    }
    if seeded:
        seeds = torch.tensor([7, -(2**61) - 5, int(draw.order(1 << 20)[0])])
        first_positions = torch.tensor([1, 2**33, 12345])
        draws = uniforms(seeds, first_positions[:, None] + torch.arange(positions))[..., WALK_WORD].contiguous()
        own = {"seeds": seeds, "first_positions": first_positions}
    else:
        draws = torch.rand(batch, positions, generator=draw.generator)
        own = {"uniforms": draws}
    tokens, q_rows = torch_select.selector_walk(**inputs, uniforms=draws)
    room = 2e-3
    cumulative = q_rows.cumsum(-1)
    near_border = ((cumulative - draws.unsqueeze(-1)).abs() < room)[1:].any()
    previous = torch.cat((inputs["anchors"][:1, None], tokens[:1, :-1]), dim=1)
    left = inputs["predecessor_codebook"].double()[previous] * inputs["hidden"][:1].double()
    scores = inputs["unary"][:1] + torch.einsum(
        "bpr,bpkr->bpk", left, inputs["successor_codebook"].double()[inputs["candidates"][:1]]
    )
    best = scores.topk(2, dim=-1).values
    if near_border or bool((best[..., 0] - best[..., 1] < room).any()):
        return None
    case = Case(name, "DFlashSelectorWalk", {"seeded": int(seeded)}, inputs | own)
    case.expect("tokens", tokens, 0.0, torch.int64)
    case.expect("q_rows", q_rows, 2e-4, torch.float32)
    return case

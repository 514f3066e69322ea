"""Convolution, candidates and selector walk on a GPU against float64 definitions, on random shapes.

Memory from ``torch.empty`` is poisoned (NaN, largest integer), so that an element nobody wrote cannot pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_select
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.runtime.random_streams import WALK_WORD, uniforms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="the plugin library is not built"),
]

CASES = 220
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place, with room for the second rounding of the fused norm.
# Subnormal halves are a fixed distance apart.
SPACING = {torch.bfloat16: 0.0, torch.float16: 2**-24, torch.float32: 0.0}
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def _convolution(x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
    taps, width = base.shape
    groups = dynamic.shape[1] // taps
    blocks = x.double().view(-1, block_size, width)
    delta = dynamic.double().reshape(-1, block_size, taps, groups).repeat_interleave(width // groups, dim=-1)
    out = torch.zeros_like(blocks)
    for tap in range(min(taps, block_size)):
        shifted = torch.nn.functional.pad(blocks, (0, 0, tap, 0))[:, :block_size]
        out += (base[tap].double() + delta[:, :, tap]) * shifted
    return out.view(x.shape)


def test_grouped_conv_in_and_out_forms() -> None:
    generator = torch.Generator("cuda").manual_seed(11)
    choose = random.Random(11)
    for case in range(CASES):
        dtype = choose.choice(DTYPES)
        group_size = choose.choice([1, 3, 4, 8, 16, 32, 64])
        width = (
            8 * group_size * choose.choice([1, 2, 9, 32]) if case % 20 else choose.choice([4096, 8200, 12288, 32768])
        )
        group_size = group_size if width % group_size == 0 else 8
        block_size, batch, taps = choose.choice([1, 2, 7, 8, 16]), choose.choice([1, 2, 5]), choose.choice([1, 2, 3, 8])
        rows, groups = batch * block_size, width // group_size
        x = _normal(generator, rows, width, dtype=dtype)
        # Both sides' deltas come from one projection: the kernel reads a column slice.
        dynamic = _normal(generator, rows, 2 * taps * groups, dtype=dtype)[:, taps * groups :]
        base = _normal(generator, taps, width, dtype=dtype)
        expected = _convolution(x, dynamic, base, block_size)
        magnitude = _convolution(x.abs(), dynamic.abs(), base.abs(), block_size)

        out = cuda_select.grouped_conv(x, dynamic, base, block_size)
        bound = ROUNDING[dtype] * expected.abs() + SPACING[dtype] + 2e-6 * magnitude
        assert bool(((out.double() - expected).abs() <= bound).all()), f"case {case}: in form, {dtype} width {width}"

        residual = _normal(generator, rows, width)
        weight = _normal(generator, width, dtype=dtype)
        total = residual.double() + expected
        kept = residual.clone()
        out = cuda_select.grouped_conv_add_rms_norm(x, dynamic, base, block_size, kept, weight, 1e-6)
        assert out is not None
        assert bool(((kept.double() - total).abs() <= 2e-6 * (magnitude + residual.abs())).all()), (
            f"case {case}: residual"
        )
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        normed = total * scale * weight.double()
        bound = (
            2 * ROUNDING[dtype] * normed.abs()
            + SPACING[dtype] * (1 + weight.double().abs())
            + 1e-5 * (magnitude + residual.abs()) * scale * weight.double().abs()
        )
        assert bool(((out.double() - normed).abs() <= bound).all()), f"case {case}: out form, {dtype} width {width}"

        only = residual.clone()
        assert cuda_select.grouped_conv_add_rms_norm(x, dynamic, base, block_size, only, None, 1e-6) is None
        assert torch.equal(only, kept)


def _reference_candidates(logits: Tensor, valid: int, count: int, offset: int) -> tuple[Tensor, Tensor]:
    known = logits[:, :valid].float()
    known = torch.where(known.isnan(), float("-inf"), known)
    values, order = torch.sort(known, dim=-1, descending=True, stable=True)
    missing = max(0, count - valid)
    pad = torch.nn.functional.pad
    return (
        pad(values[:, :count], (0, missing), value=float("-inf")),
        pad(order[:, :count] + offset, (0, missing), value=-1),
    )


def _logits(kind: str, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    x = _normal(generator, rows, columns, scale=3.0)
    if kind == "ties":
        x = x.round()
    elif kind == "equal":
        x = torch.zeros_like(x)
    elif kind == "descending":
        x = -torch.arange(columns, device="cuda").float().expand(rows, -1) / 64
    elif kind == "ascending":
        x = torch.arange(columns, device="cuda").float().expand(rows, -1) / 64
    elif kind == "banned":
        x = torch.where(torch.rand(rows, columns, generator=generator, device="cuda") < 0.999, float("-inf"), x)
    elif kind == "all banned":
        x = torch.full_like(x, float("-inf"))
    elif kind == "nan":
        x = torch.where(torch.rand(rows, columns, generator=generator, device="cuda") < 0.1, float("nan"), x)
    elif kind == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    return x.to(dtype)


def test_candidates() -> None:
    generator = torch.Generator("cuda").manual_seed(12)
    choose = random.Random(12)
    kinds = ["normal", "ties", "equal", "descending", "ascending", "banned", "all banned", "nan", "signed zeros"]
    for case in range(CASES + len(kinds)):
        dtype, kind = choose.choice(DTYPES), kinds[case % len(kinds)]
        columns = choose.choice([1, 5, 31, 33, 1000, 8191, 8192, 8193, 49152, choose.randint(1, 60000)])
        if case % 16 == 0:
            columns = choose.choice([151936, 151669, 248320, 300000])
        rows, count, offset = (
            choose.choice([1, 2, 7, 15]),
            choose.choice([1, 2, 8, 16, 31, 32]),
            choose.choice([0, 70001]),
        )
        valid = columns if choose.random() < 0.5 else choose.randint(0, columns)
        # A slice that starts off a 16-byte boundary, with rows of any stride.
        lead = choose.choice([0, 0, 1, 3])
        logits = _logits(kind, rows, columns + lead, dtype, generator)[:, lead:]
        if kind == "normal":
            logits[:, valid:] = 1e4
        values, ids = cuda_select.candidates(logits, count, valid_columns=valid, id_offset=offset)
        expected_values, expected_ids = _reference_candidates(logits, valid, count, offset)
        where = f"case {case}: {kind} {dtype} rows {rows} columns {columns} valid {valid} count {count}"
        assert torch.equal(values, expected_values), where
        assert torch.equal(ids, expected_ids), where


def test_candidates_with_multiplier_and_softcap() -> None:
    generator = torch.Generator("cuda").manual_seed(13)
    for columns in (300, 9001, 151936):
        logits = _normal(generator, 7, columns, dtype=torch.bfloat16, scale=30.0)
        values, ids = cuda_select.candidates(logits, 16, multiplier=0.2, softcap=20.0)
        capped = torch.tanh(logits.double() * 0.2 / 20.0) * 20.0
        torch.testing.assert_close(values.double(), capped.gather(1, ids), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values.double(), capped.topk(16).values, rtol=1e-5, atol=1e-5)
        assert bool((values[:, 1:] <= values[:, :-1]).all())


def test_merged_shards_equal_the_whole_vocabulary() -> None:
    generator = torch.Generator("cuda").manual_seed(14)
    choose = random.Random(14)
    for case in range(CASES):
        shards, per_shard = choose.choice([1, 2, 4, 8]), choose.choice([3, 16, 500, 20000])
        rows, count = choose.choice([1, 7]), choose.choice([1, 16, 32])
        columns = shards * per_shard
        valid = choose.randint(1, columns)
        logits = _logits(choose.choice(["normal", "ties", "equal"]), rows, columns, torch.bfloat16, generator)
        parts = [
            cuda_select.candidates(
                logits[:, first : first + per_shard],
                count,
                valid_columns=min(max(valid - first, 0), per_shard),
                id_offset=first,
            )
            for first in range(0, columns, per_shard)
        ]
        values, ids = cuda_select.merge_candidates(*(torch.stack(part) for part in zip(*parts, strict=True)))
        expected_values, expected_ids = _reference_candidates(logits, valid, count, 0)
        assert torch.equal(values, expected_values), f"case {case}"
        assert torch.equal(ids, expected_ids), f"case {case}"


def _walk_inputs(
    generator: torch.Generator, batch: int, positions: int, count: int, rank: int, dtype: torch.dtype, vocabulary: int
) -> dict[str, Tensor]:
    order = torch.rand(batch, positions, vocabulary, generator=generator, device="cuda").argsort(-1)
    return {
        "unary": _normal(generator, batch, positions, count, scale=2.0),
        "candidate_ids": order[..., :count].contiguous(),
        "hidden": _normal(generator, batch, positions, rank, dtype=dtype),
        "predecessor_codebook": _normal(generator, vocabulary, rank, dtype=dtype, scale=rank**-0.25),
        "successor_codebook": _normal(generator, vocabulary, rank, dtype=dtype, scale=rank**-0.25),
        "anchors": torch.randint(vocabulary, (batch,), generator=generator, device="cuda"),
    }


def test_selector_walk() -> None:
    generator = torch.Generator("cuda").manual_seed(15)
    choose = random.Random(15)
    for case in range(CASES):
        batch, positions, count = (
            choose.choice([1, 2, 9]),
            choose.choice([1, 3, 7, 8, 15]),
            choose.choice([1, 2, 16, 31, 32]),
        )
        rank, dtype = choose.choice([8, 64, 136, 256]), choose.choice(DTYPES)
        inputs = _walk_inputs(generator, batch, positions, count, rank, dtype, 400)
        temperatures = torch.tensor([choose.choice([0.0, 0.0, 0.3, 1.0, 1.7]) for _ in range(batch)], device="cuda")
        draws = torch.rand(batch, positions, generator=generator, device="cuda")
        draws[:, ::3] = choose.choice([0.0, 1 - 2**-24])
        tokens, q_rows = cuda_select.selector_walk(**inputs, temperatures=temperatures, uniforms=draws)

        # The definition in float64, walked along the kernel's own choices: each step is then judged alone.
        ids = inputs["candidate_ids"]
        is_choice = ids == tokens.unsqueeze(-1)
        assert bool((is_choice.sum(-1) == 1).all()), f"case {case}: a token is not among its candidates"
        previous = torch.cat((inputs["anchors"][:, None], tokens[:, :-1]), dim=1)
        left = inputs["predecessor_codebook"].double()[previous] * inputs["hidden"].double()
        products = torch.einsum("bpr,bpkr->bpk", left, inputs["successor_codebook"].double()[ids])
        scores = inputs["unary"].double() + products
        greedy = (temperatures <= 0)[:, None, None]
        chosen = scores[is_choice].view(batch, positions)
        # float32 sums of `rank` products of order 1.
        noise = 2e-5
        assert bool((chosen >= scores.amax(-1) - noise)[temperatures <= 0].all()), f"case {case}: greedy choice"
        expected = torch.where(
            greedy, is_choice.double(), torch.softmax(scores / temperatures.double()[:, None, None].clamp_min(0.1), -1)
        )
        torch.testing.assert_close(q_rows.double(), expected, rtol=0, atol=2e-4, msg=lambda m, c=case: f"case {c}: {m}")
        cumulative = q_rows.double().cumsum(-1)
        upper = cumulative[is_choice].view(batch, positions)
        own = q_rows.double()[is_choice].view(batch, positions)
        sampled = (temperatures > 0)[:, None]
        fits = (upper >= draws - 1e-5) & (upper - own <= draws + 1e-5) & (own > 0)
        assert bool((fits | ~sampled).all()), f"case {case}: not the inverse CDF"


def test_walk_draws_from_the_requests_own_stream() -> None:
    generator = torch.Generator("cuda").manual_seed(16)
    batch, positions = 33, 15
    inputs = _walk_inputs(generator, batch, positions, 16, 64, torch.float32, 300)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator, device="cuda")
    first_positions = torch.randint(0, 2**34, (batch,), generator=generator, device="cuda")
    temperatures = torch.ones(batch, device="cuda")
    draws = uniforms(seeds, first_positions[:, None] + torch.arange(positions, device="cuda"))[..., WALK_WORD]
    given = cuda_select.selector_walk(**inputs, temperatures=temperatures, uniforms=draws.contiguous())
    drawn = cuda_select.selector_walk(**inputs, temperatures=temperatures, seeds=seeds, first_positions=first_positions)
    assert torch.equal(given[0], drawn[0])
    assert torch.equal(given[1], drawn[1])


def test_walk_survives_banned_and_missing_candidates() -> None:
    generator = torch.Generator("cuda").manual_seed(17)
    inputs = _walk_inputs(generator, 2, 7, 4, 8, torch.float32, 50)
    inputs["unary"][:, :, 1:] = float("-inf")
    inputs["candidate_ids"][:, :, 3] = -1
    temperatures = torch.tensor([0.0, 1.0], device="cuda")
    tokens, q_rows = cuda_select.selector_walk(
        **inputs, temperatures=temperatures, uniforms=torch.full((2, 7), 1 - 2**-24, device="cuda")
    )
    assert torch.equal(tokens, inputs["candidate_ids"][..., 0])
    assert torch.equal(q_rows, torch.tensor([1.0, 0.0, 0.0, 0.0], device="cuda").expand(2, 7, 4))


def test_impossible_arguments_come_back_as_errors() -> None:
    x = torch.zeros(8, 64, device="cuda")
    with pytest.raises(EngineError, match="rows 8 is not a whole number of blocks of 3"):
        cuda_select.grouped_conv(x, torch.zeros(8, 8, device="cuda"), torch.zeros(2, 64, device="cuda"), 3)
    with pytest.raises(EngineError, match=r"count 33, expected 1\.\.32"):
        cuda_select.candidates(x, 33)
    with pytest.raises(EngineError, match="valid_columns 65"):
        cuda_select.candidates(x, 4, valid_columns=65)


def test_graph_replay_reads_the_inputs_of_the_moment() -> None:
    generator = torch.Generator("cuda").manual_seed(18)
    logits = _normal(generator, 7, 20000)
    inputs = _walk_inputs(generator, 1, 7, 16, 64, torch.float32, 20000)
    inputs.pop("unary")
    inputs.pop("candidate_ids")
    temperatures, draws = torch.ones(1, device="cuda"), torch.rand(1, 7, generator=generator, device="cuda")

    def propose() -> tuple[Tensor, Tensor]:
        values, ids = cuda_select.candidates(logits, 16)
        return cuda_select.selector_walk(
            unary=values.view(1, 7, 16),
            candidate_ids=ids.view(1, 7, 16),
            temperatures=temperatures,
            uniforms=draws,
            **inputs,
        )

    propose()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = propose()
    for _ in range(3):
        logits.copy_(_normal(generator, 7, 20000))
        draws.copy_(torch.rand(1, 7, generator=generator, device="cuda"))
        graph.replay()
        tokens, q_rows = propose()
        assert torch.equal(captured[0], tokens)
        assert torch.equal(captured[1], q_rows)

"""KV injection and the small fused kernels against their definitions in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from trtllm_dflash.ops.plugin_library import find_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the plugin library: trtllm-dflash plugins build"),
]

FLOAT8 = torch.float8_e4m3fn
EPS = 1e-6
MAX_POSITIONS = 4096


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda")


def rotation_table(rotary_dim: int) -> Tensor:
    if rotary_dim == 0:
        return torch.empty(MAX_POSITIONS, 0, device="cuda")
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device="cuda").double() / rotary_dim)
    angles = torch.arange(MAX_POSITIONS, device="cuda").double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotation of ``x [N, heads, head_dim]``, float64."""
    rotary_dim = table.shape[1]
    cos, sin = table.double()[positions.long()][:, None].chunk(2, dim=-1)
    low, high, rest = x.split((rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def assert_rounded(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """``found * scale`` is ``expected`` within one rounding of found's dtype, plus float32 arithmetic."""
    if found.dtype == FLOAT8:
        # Three mantissa bits; the smallest subnormal is 2^-9; +-448 saturates.
        expected = (expected / scale).clamp(-448, 448)
        tolerance = expected.abs() * (2.0**-4 + 1e-5) + 2.0**-10 + 1e-5
        found = found.double()
    else:
        tolerance = expected.abs() * (torch.finfo(found.dtype).eps / 2 + 1e-5) + 1e-5
        found = found.double() * scale
    excess = ((found - expected).abs() - tolerance).nan_to_num(float("inf"))
    assert excess.numel() == 0 or excess.max() <= 0, f"{excess.max():.3g} beyond tolerance"


def poisoned_cache(pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((pages + 1, page_tokens, kv_heads, head_dim), float("nan"), device="cuda").to(dtype)


@pytest.mark.parametrize("seed", range(200))
def test_inject(seed: int) -> None:
    from trtllm_dflash.ops.cuda_fused import inject_kv

    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    layers, kv_heads = rng.randint(1, 6), rng.choice((1, 2, 3, 8))
    head_dim = rng.choice((64, 80, 96, 128, 256))
    rotary_dim = rng.choice((head_dim, head_dim // 2 // 16 * 16, 0))
    rows = rng.choice((1, 2, 7, rng.randint(1, 100)))
    page_tokens = rng.choice((16, 32, 64))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    cache_dtype = rng.choice((dtype, FLOAT8))
    index_dtype = rng.choice((torch.int32, torch.int64))
    pages = rows // page_tokens + 3
    slots = torch.randperm(pages * page_tokens, generator=generator, device="cuda")[:rows]
    dropped = torch.rand(rows, generator=generator, device="cuda") < rng.choice((0.0, 0.3, 1.0))
    slots = slots.masked_fill(dropped, -1).to(index_dtype)
    positions = torch.randint(0, MAX_POSITIONS, (rows,), generator=generator, device="cuda").to(index_dtype)
    kv = normal(generator, rows, layers, 2, kv_heads, head_dim).to(dtype)
    weight = (1 + 0.3 * normal(generator, layers, head_dim)).to(dtype) if rng.random() < 0.8 else None
    table = rotation_table(rotary_dim)
    k_caches = [poisoned_cache(pages, page_tokens, kv_heads, head_dim, cache_dtype) for _ in range(layers)]
    v_caches = [cache.clone() for cache in k_caches]
    scales = [0.05 * (layer + 1) for layer in range(layers)] if cache_dtype == FLOAT8 else [1.0] * layers

    inject_kv(kv, positions, slots, table, weight, EPS, k_caches, v_caches, k_scales=scales, v_scales=scales)

    kept = slots >= 0
    flat_slots = slots[kept].long()
    for layer in range(layers):
        k = normed(kv[:, layer, 0].double(), None if weight is None else weight[layer])
        k = rotated(k, table, positions) if rotary_dim else k
        for cache, expected in ((k_caches[layer], k), (v_caches[layer], kv[:, layer, 1].double())):
            flat = cache.view(-1, kv_heads, head_dim)
            assert_rounded(flat[flat_slots], expected[kept], scales[layer])
            untouched = torch.ones(flat.shape[0], dtype=torch.bool, device="cuda")
            untouched[flat_slots] = False
            assert flat[untouched].float().isnan().all()


@pytest.mark.parametrize("seed", range(200))
def test_qk_norm_rope_write(seed: int) -> None:
    from trtllm_dflash.ops.cuda_fused import qk_norm_rope_write

    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    kv_heads, group = rng.choice((1, 2, 3, 8)), rng.choice((1, 2, 4, 7))
    heads, head_dim = kv_heads * group, rng.choice((64, 80, 96, 128, 256))
    rotary_dim = rng.choice((head_dim, head_dim // 2 // 16 * 16, 0))
    tokens, page_tokens = rng.randint(1, 70), rng.choice((16, 32, 64))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    cache_dtype = rng.choice((dtype, FLOAT8))
    index_dtype = rng.choice((torch.int32, torch.int64))
    pages = tokens // page_tokens + 2
    slots = torch.randperm(pages * page_tokens, generator=generator, device="cuda")[:tokens]
    dropped = torch.rand(tokens, generator=generator, device="cuda") < rng.choice((0.0, 0.3))
    slots = slots.masked_fill(dropped, -1).to(index_dtype)
    positions = torch.randint(0, MAX_POSITIONS, (tokens,), generator=generator, device="cuda").to(index_dtype)
    qkv = normal(generator, tokens, (heads + 2 * kv_heads) * head_dim + 16).to(dtype)[:, :-16]
    with_norm = rng.random() < 0.7
    q_weight, k_weight = ((1 + 0.3 * normal(generator, head_dim)).to(dtype) if with_norm else None for _ in range(2))
    table = rotation_table(rotary_dim)
    k_cache = poisoned_cache(pages, page_tokens, kv_heads, head_dim, cache_dtype)
    v_cache = k_cache.clone()
    scale = 0.1 if cache_dtype == FLOAT8 else 1.0

    q = qk_norm_rope_write(
        qkv, heads, positions, slots, table, q_weight, k_weight, EPS, k_cache, v_cache, k_scale=scale, v_scale=scale
    )

    parts = qkv.double().reshape(tokens, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    expected_q, expected_k = normed(parts[0], q_weight), normed(parts[1], k_weight)
    if rotary_dim:
        expected_q, expected_k = rotated(expected_q, table, positions), rotated(expected_k, table, positions)
    assert_rounded(q, expected_q)
    kept = slots >= 0
    flat_slots = slots[kept].long()
    for cache, expected in ((k_cache, expected_k), (v_cache, parts[2])):
        flat = cache.view(-1, kv_heads, head_dim)
        assert_rounded(flat[flat_slots], expected[kept], scale)
        untouched = torch.ones(flat.shape[0], dtype=torch.bool, device="cuda")
        untouched[flat_slots] = False
        assert flat[untouched].float().isnan().all()


@pytest.mark.parametrize("seed", range(200))
def test_add_rms_norm(seed: int) -> None:
    from trtllm_dflash.ops.cuda_fused import add_rms_norm

    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, width = rng.randint(1, 40), 8 * rng.choice((1, 31, 72, 256, 512, 513, 1024, 2049, rng.randint(1, 4096)))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    residual = normal(generator, rows, width).to(rng.choice((dtype, torch.float32)))
    weight = normal(generator, width).to(dtype)
    x = normal(generator, rows, width).to(dtype) if rng.random() < 0.8 else None
    expected_residual = residual if x is None else (residual.float() + x.float()).to(residual.dtype)

    wide = torch.full((rows, 3 * width), float("nan"), dtype=residual.dtype, device="cuda")
    kept = wide[:, width : 2 * width] if rng.random() < 0.5 else None

    out = add_rms_norm(x, residual, weight, EPS, kept=kept)

    assert torch.equal(residual, expected_residual)
    if kept is not None:
        assert torch.equal(kept, expected_residual)
        assert wide[:, :width].isnan().all()
        assert wide[:, 2 * width :].isnan().all()
    assert_rounded(out, normed(expected_residual.double(), weight))


@pytest.mark.parametrize("seed", range(200))
def test_swiglu(seed: int) -> None:
    from trtllm_dflash.ops.cuda_fused import swiglu

    rng = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    rows, width = rng.randint(1, 60), 8 * rng.choice((1, 3, 192, 1536, rng.randint(1, 2000)))
    gate_up = (3 * normal(generator, rows, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(swiglu(gate_up), gate * torch.sigmoid(gate) * up)


def test_swiglu_of_very_negative_gates_is_zero() -> None:
    from trtllm_dflash.ops.cuda_fused import swiglu

    gate_up = torch.full((1, 16), -200.0, dtype=torch.bfloat16, device="cuda")
    assert swiglu(gate_up).eq(0).all()

"""Attention, KV injection and the small fused kernels against the copy roofline and torch's own attention: a part of
``python -m benchmarks.kernels``.

Times are those of ``gpu_timing`` over rotating inputs that exceed the L2 cache; bytes are what must be read and written
once; the roofline is a device-to-device copy measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import read_floor
from benchmarks.gpu_timing import Replayed, Roofline, least_us, time_us
from trtllm_dflash.ops import cuda_attention, cuda_fused

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 32
SCALE = HEAD_DIM**-0.5
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (4096, 8192, 16384, 32768)
BLOCK_SIZES = (8, 16)
# Where torch is timed as well (FlexAttention, which compiles for each shape, only at two of them).
COMPARED_BATCHES, COMPARED_CONTEXTS = (1, 4, 16, 64), (4096, 32768)
FLEX_SHAPES = {(1, 32768, 8), (16, 4096, 16)}
# Form → (keys of the block come from the cache, context_settled).
FORMS = {
    "draft": (False, False),
    "verify": (True, False),
    "draft_settled": (False, True),
    "verify_settled": (True, True),
}
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2


@dataclass
class AttentionData:
    """Several independent batches of one shape; the caches of all of them share one pool of pages."""

    batch: int
    context: int
    block: int
    pool_k: Tensor
    pool_v: Tensor
    page_tables: list[Tensor]
    queries: list[Tensor]
    k_blocks: list[Tensor]
    v_blocks: list[Tensor]

    @classmethod
    def draw(cls, batch: int, context: int, block: int) -> AttentionData:
        generator = torch.Generator("cuda").manual_seed(batch * context + block)
        # The verify form reads its block's rows from the cache, hence room for them.
        pages = -(-(context + block) // PAGE_TOKENS)
        set_bytes = batch * context * TOKEN_BYTES
        sets = max(1, min(6, (1 << 30) // set_bytes))
        shape = (sets * batch * pages + 1, PAGE_TOKENS, KV_HEADS, HEAD_DIM)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        order = torch.randperm(sets * batch * pages, generator=generator, device="cuda").view(sets, batch, pages)
        return cls(
            batch,
            context,
            block,
            normal(*shape),
            normal(*shape),
            list(order),
            [normal(batch * block, HEADS, HEAD_DIM) for _ in range(sets)],
            [normal(batch * block, KV_HEADS, HEAD_DIM) for _ in range(sets)],
            [normal(batch * block, KV_HEADS, HEAD_DIM) for _ in range(sets)],
        )

    @property
    def bytes(self) -> int:
        """Read once: cached context, the block's K/V, queries; written once: the result."""
        return self.batch * ((self.context + self.block) * TOKEN_BYTES + 2 * self.block * HEADS * HEAD_DIM * 2)

    def ours(self, index: int, *, verify: bool, settled: bool = False) -> Callable[[], Tensor]:
        contexts = torch.full((self.batch,), self.context, device="cuda")
        q, table = self.queries[index], self.page_tables[index]
        if verify:
            starts = torch.arange(self.batch + 1, device="cuda") * self.block
            return lambda: cuda_attention.paged_attention(
                q, self.pool_k, self.pool_v, table, contexts, starts, self.block, scale=SCALE, context_settled=settled
            )
        return lambda: cuda_attention.block_attention(
            q,
            self.k_blocks[index],
            self.v_blocks[index],
            self.pool_k,
            self.pool_v,
            table,
            contexts,
            None,
            self.block,
            scale=SCALE,
            context_settled=settled,
        )

    def dense(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V as ``[B, kv_heads, context + S, head_dim]``, contiguous: torch is spared the paging."""
        parts = []
        for pool, block in ((self.pool_k, self.k_blocks[index]), (self.pool_v, self.v_blocks[index])):
            cached = pool[self.page_tables[index]].view(self.batch, -1, KV_HEADS, HEAD_DIM)[:, : self.context]
            block = block.view(self.batch, self.block, KV_HEADS, HEAD_DIM)
            parts.append(torch.cat((cached, block), dim=1).transpose(1, 2).contiguous())
        return parts[0], parts[1]


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def torch_calls(data: AttentionData, index: int) -> dict[str, Callable[[], Tensor]]:
    """Every way torch offers to compute the draft form, by name. ``tall`` queries hold the rows of a whole KV group,
    which non-causal blocks allow and which is how torch is fastest here."""
    k, v = data.dense(index)
    q = data.queries[index].view(data.batch, data.block, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    calls: dict[str, Callable[[], Tensor]] = {}
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():

        def grouped(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)

        calls[f"sdpa_{name}_gqa"] = grouped
    group = HEADS // KV_HEADS
    tall = q.view(data.batch, KV_HEADS, group * data.block, HEAD_DIM)
    backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    for name, backend in backends.items():

        def taller(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(tall, k, v, scale=SCALE)

        calls[f"sdpa_{name}_tall"] = taller

    from torch.nn.attention.varlen import varlen_attn

    packed_q = tall.transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)
    packed_k, packed_v = (x.transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM) for x in (k, v))
    q_starts = torch.arange(data.batch + 1, dtype=torch.int32, device="cuda") * tall.shape[2]
    k_starts = torch.arange(data.batch + 1, dtype=torch.int32, device="cuda") * k.shape[2]
    calls["varlen_tall"] = lambda: (
        varlen_attn(packed_q, packed_k, packed_v, q_starts, k_starts, tall.shape[2], k.shape[2])
        .view(data.batch, group, data.block, KV_HEADS, HEAD_DIM)
        .permute(0, 3, 1, 2, 4)
    )
    if (data.batch, data.context, data.block) in FLEX_SHAPES:
        flex = compiled_flex_attention()
        calls["flex_gqa"] = lambda: flex(q, k, v, scale=SCALE, enable_gqa=True)
    return calls


def best_of_torch(data: AttentionData) -> tuple[str, Replayed]:
    """Name of torch's fastest and its calls; every contender must first agree with our result."""
    ours = data.ours(0, verify=False)().view(data.batch, data.block, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    ours = ours.permute(0, 2, 3, 1, 4)
    recorded: dict[str, Replayed] = {}
    timed: dict[str, float] = {}
    # Several dense copies where the data is small, so that torch does not find it in the L2 either.
    sets = [torch_calls(data, index) for index in range(min(3, len(data.queries)))]
    for name in sets[0]:
        try:
            difference = (sets[0][name]().reshape(ours.shape).float() - ours.float()).abs().max().item()
            recorded[name] = Replayed([calls[name] for calls in sets])
            timed[name] = recorded[name].median_us()
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"    {name}: not available here ({str(error).splitlines()[0][:90]})", flush=True)
            continue
        if not difference < 2e-2:
            raise SystemExit(f"{name} and ours differ by {difference}")
    print("    " + ", ".join(f"{name} {elapsed:.1f}" for name, elapsed in timed.items()), flush=True)
    fastest = min(timed, key=lambda name: timed[name])
    return fastest, recorded[fastest]


def shapes(batches: Sequence[int], contexts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(batch, context, block size) whose cache does not fit the L2."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for block in BLOCK_SIZES:
        for batch in batches:
            for context in contexts:
                if batch * context * TOKEN_BYTES > l2_bytes:
                    yield batch, context, block


def measure_attention(roofline: Roofline) -> dict[str, float]:
    """Every shape, both forms. ``settled``: with ``context_settled``, which lets a call start to read the cache while
    the launch in front of it, here another call, ends; a copy has no such overlap."""
    figures: dict[str, float] = {}
    worst: dict[str, float] = {}
    print(f"{'shape':<20}" + "".join(f"{form:>18}{'roof':>6}{'peak':>6}" for form in FORMS))
    for batch, context, block in shapes(BATCHES, CONTEXTS):
        data = AttentionData.draw(batch, context, block)
        key = f"b{batch}_ctx{context}_s{block}"
        line = f"{key:<20}"
        recorded = [
            Replayed([data.ours(i, verify=verify, settled=settled) for i in range(len(data.queries))])
            for verify, settled in FORMS.values()
        ]
        for (form, (_, settled)), elapsed in zip(FORMS.items(), least_us(recorded), strict=True):
            rate = data.bytes / elapsed
            shares = {"roofline": rate / roofline.at(data.bytes), "peak": rate / roofline.peak}
            figures[f"attention_{form}_us_{key}"] = round(elapsed, 2)
            for name, share in shares.items():
                figures[f"attention_{form}_{name}_{key}"] = round(share, 3)
                total = f"attention_{'settled_' if settled else ''}{name}_min"
                worst[total] = min(worst.get(total, share), share)
            line += f"{elapsed:>18.1f}{shares['roofline']:>6.2f}{shares['peak']:>6.2f}"
        print(line, flush=True)
        del data, recorded
        torch.cuda.empty_cache()
    return figures | {name: round(share, 3) for name, share in worst.items()}


def compare_with_torch() -> dict[str, float]:
    """The draft form against the fastest that torch offers on the same numbers, side by side."""
    figures: dict[str, float] = {}
    ratios = []
    print(f"{'shape':<20}{'ours us':>9}{'torch us':>9}{'ratio':>7}  by")
    for batch, context, block in shapes(COMPARED_BATCHES, COMPARED_CONTEXTS):
        data = AttentionData.draw(batch, context, block)
        key = f"b{batch}_ctx{context}_s{block}"
        name, fastest = best_of_torch(data)
        recorded = [Replayed([data.ours(index, verify=False) for index in range(len(data.queries))]), fastest]
        ours, theirs = least_us(recorded)
        ratio = theirs / ours
        figures[f"attention_torch_us_{key}"] = round(theirs, 2)
        figures[f"attention_over_torch_{key}"] = round(ratio, 3)
        ratios.append(ratio)
        print(f"{key:<20}{ours:>9.1f}{theirs:>9.1f}{ratio:>7.2f}  {name}", flush=True)
        del data, recorded, fastest
        torch.cuda.empty_cache()
    figures["attention_over_torch_min"] = round(min(ratios), 3)
    return figures


def measure_fused(roofline: Roofline) -> dict[str, float]:
    """Injection at several token counts, and the target's small kernels at 4096 tokens of a Qwen3-8B shape."""
    figures: dict[str, float] = {}
    layers, hidden, intermediate, eps = 5, 4096, 12288, 1e-6
    angles = torch.rand(40960, HEAD_DIM // 2, device="cuda") * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def report(name: str, moved: int, calls: Sequence[Callable[[], object]]) -> None:
        elapsed = time_us(calls)
        figures[f"{name}_us"] = round(elapsed, 2)
        figures[f"{name}_roofline"] = round(moved / elapsed / roofline.at(moved), 3)
        figures[f"{name}_peak"] = round(moved / elapsed / roofline.peak, 3)
        print(
            f"{name:<26}{elapsed:>9.1f}{figures[f'{name}_roofline']:>6.2f}{figures[f'{name}_peak']:>6.2f}", flush=True
        )

    sets = 4
    weight = 1 + 0.1 * normal(layers, HEAD_DIM)
    for tokens in (512, 4096, 16384):
        pages = tokens // PAGE_TOKENS
        calls = []
        for _ in range(sets):
            kv = normal(tokens, layers, 2, KV_HEADS, HEAD_DIM)
            caches = [
                torch.empty(pages + 1, PAGE_TOKENS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
                for _ in range(2 * layers)
            ]
            pages_in_order = torch.randperm(pages, device="cuda")
            slots = (pages_in_order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device="cuda")).view(-1)
            positions = torch.arange(tokens, device="cuda")
            calls.append(
                lambda kv=kv, caches=caches, slots=slots, positions=positions: cuda_fused.inject_kv(
                    kv, positions, slots, table, weight, eps, caches[:layers], caches[layers:]
                )
            )
        report(f"inject_{tokens}", 2 * tokens * layers * TOKEN_BYTES, calls)
    figures["inject_roofline"] = figures["inject_4096_roofline"]

    tokens = 4096
    positions = torch.arange(tokens, device="cuda")
    cache = [
        torch.empty(tokens // PAGE_TOKENS + 1, PAGE_TOKENS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    ]
    wide = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    inputs = [normal(tokens, wide) for _ in range(sets)]
    report(
        "qk_norm_rope_write_4096",
        2 * tokens * wide * 2,
        [
            lambda x=x: cuda_fused.qk_norm_rope_write(
                x, HEADS, positions, positions, table, weight[0], weight[0], eps, cache[0], cache[1]
            )
            for x in inputs
        ],
    )
    norm_weight = normal(hidden)
    pairs = [(normal(tokens, hidden), normal(tokens, hidden)) for _ in range(sets)]
    report(
        "add_rms_norm_4096",
        4 * tokens * hidden * 2,
        [lambda x=x, r=r: cuda_fused.add_rms_norm(x, r, norm_weight, eps) for x, r in pairs],
    )
    gates = [normal(tokens, 2 * intermediate) for _ in range(sets)]
    report("swiglu_4096", 3 * tokens * intermediate * 2, [lambda x=x: cuda_fused.swiglu(x) for x in gates])
    return figures


def measure() -> dict[str, float]:
    """All figures of this file but those of :func:`compare_with_torch`."""
    roofline = Roofline()
    figures = {f"copy_{size}mb_tb_s": round(rate / 1e6, 3) for size, rate in roofline.by_megabytes.items()}
    figures |= read_floor.measure(time_us)
    print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    figures |= measure_fused(roofline)
    return figures | measure_attention(roofline)

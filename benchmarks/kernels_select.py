"""Times of the convolution, candidate, walk and accept kernels on the GPU in this machine.

    python -m benchmarks.kernels_select

Every time is a median over replays of a CUDA graph that holds the operation many times on rotating inputs, so that
launch gaps count and caches are as warm as in service: logits of a small batch were just written, codebook rows are
cold. Limits are measured in the same run: copy bandwidth, and the matrix products of a Qwen3-8B-shaped cycle.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.result_file import write_result
from trtllm_dflash.ops import cuda_dense, cuda_select
from trtllm_dflash.ops.plugin_library import load_library

VOCABULARY, COUNT, RANK, BLOCK = 151936, 16, 256, 8
REPLAYS = 40


@dataclass(frozen=True)
class TargetShape:
    """Matrix products of one decoder: Qwen3-8B for the target, the same width and five layers for its drafter."""

    layers: int = 36
    drafter_layers: int = 5
    hidden: int = 4096
    qkv: int = 6144
    attention: int = 4096
    intermediate: int = 12288
    conv_groups: int = 256
    conv_taps: int = 2


def graph_time_us(calls: list[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds of one call, over replays of a graph that holds all ``calls``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for replay in range(replays + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 5:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second of a device copy of 2 GiB of random data."""
    source = torch.randint(0, 2**62, (2**28,), device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / statistics.median(times[3:])


def llm_like_logits(generator: torch.Generator, batch: int, rows: int, dtype: torch.dtype) -> Tensor:
    """A broad bulk that holds a few per cent of the mass and some twenty likely tokens, as language models give."""
    logits = torch.randn(batch, rows, VOCABULARY, generator=generator, device="cuda") * 2
    likely = torch.randint(VOCABULARY, (batch, rows, 20), generator=generator, device="cuda")
    heights = 16.5 - 0.6 * torch.arange(20.0, device="cuda").expand(batch, rows, -1)
    return logits.scatter_(-1, likely, heights).to(dtype)


def candidates_and_walk(generator: torch.Generator) -> dict[str, float]:
    figures = {}
    codebooks = [torch.randn(VOCABULARY, RANK, generator=generator, device="cuda").bfloat16() for _ in range(2)]
    for batch, dtype in ((1, torch.float32), (1, torch.bfloat16), (8, torch.float32), (32, torch.float32)):
        shape, positions = f"B{batch}_S{BLOCK}_{str(dtype).removeprefix('torch.')}", BLOCK - 1
        sets = [llm_like_logits(generator, batch, positions, dtype).flatten(0, 1) for _ in range(4)]
        hidden = torch.randn(batch, positions, RANK, generator=generator, device="cuda").bfloat16()
        anchors = torch.randint(VOCABULARY, (batch,), generator=generator, device="cuda")
        temperatures = torch.ones(batch, device="cuda")
        seeds = torch.arange(batch, device="cuda")

        def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
            return cuda_select.candidates(logits, COUNT)

        def walk(
            values: Tensor,
            ids: Tensor,
            batch: int = batch,
            positions: int = positions,
            hidden: Tensor = hidden,
            anchors: Tensor = anchors,
            temperatures: Tensor = temperatures,
            seeds: Tensor = seeds,
        ) -> object:
            return cuda_select.selector_walk(
                values.view(batch, positions, COUNT),
                ids.view(batch, positions, COUNT),
                hidden,
                *codebooks,
                anchors,
                temperatures,
                seeds=seeds,
                first_positions=seeds,
            )

        chosen = [choose(logits) for logits in sets]
        figures[f"candidates_us/{shape}"] = graph_time_us([lambda x=x: choose(x) for x in sets] * 5)
        figures[f"walk_us/{shape}"] = graph_time_us([lambda c=c: walk(*c) for c in chosen] * 5)
        figures[f"candidates_walk_us/{shape}"] = graph_time_us([lambda x=x: walk(*choose(x)) for x in sets] * 5)
    figures["candidates_walk_us"] = figures[f"candidates_walk_us/B1_S{BLOCK}_float32"]
    return figures


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` by whichever of the two the runtime takes for this shape."""
    return cuda_dense.skinny_linear(x, weight) if cuda_dense.worthwhile(x, weight) else F.linear(x, weight)


def convolution(generator: torch.Generator, shape: TargetShape) -> dict[str, float]:
    figures = {}

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda").bfloat16()

    base, weight = normal(shape.conv_taps, shape.hidden), normal(shape.hidden)
    side = shape.conv_taps * shape.conv_groups
    for batch in (1, 8, 32):
        rows = batch * BLOCK
        sets = [
            (normal(rows, shape.hidden), normal(rows, 2 * side), normal(rows, shape.hidden).float()) for _ in range(4)
        ]
        name = f"B{batch}_S{BLOCK}_H{shape.hidden}"
        figures[f"conv_in_us/{name}"] = graph_time_us(
            [lambda s=s: cuda_select.grouped_conv(s[0], s[1][:, :side], base, BLOCK) for s in sets] * 5
        )
        figures[f"conv_out_us/{name}"] = graph_time_us(
            [
                lambda s=s: cuda_select.grouped_conv_add_rms_norm(s[0], s[1][:, side:], base, BLOCK, s[2], weight, 1e-6)
                for s in sets
            ]
            * 5
        )
    # Both convolutions of a sublayer with their projection, as they follow each other in a drafter; weights are cold.
    projections = [normal(2 * side, shape.hidden) * shape.hidden**-0.5 for _ in range(40)]
    for batch in (1, 2, 4):
        rows = batch * BLOCK
        x, residual = normal(rows, shape.hidden), normal(rows, shape.hidden).float()

        def both(weight_of: Tensor, x: Tensor = x, residual: Tensor = residual) -> object:
            dynamic = project(x, weight_of)
            front = cuda_select.grouped_conv(x, dynamic[:, :side], base, BLOCK)
            return cuda_select.grouped_conv_add_rms_norm(front, dynamic[:, side:], base, BLOCK, residual, weight, 1e-6)

        figures[f"conv_both_us/B{batch}_S{BLOCK}"] = graph_time_us([lambda w=w: both(w) for w in projections])
    x = normal(BLOCK, shape.hidden)
    figures["conv_projection_us/B1_S8"] = graph_time_us([lambda w=w: project(x, w) for w in projections])
    figures["conv_projection_cublas_us/B1_S8"] = graph_time_us([lambda w=w: F.linear(x, w) for w in projections])
    selector = [normal(RANK, shape.hidden) for _ in range(40)]
    figures["selector_projection_us/B1_S8"] = graph_time_us([lambda w=w: project(x[1:], w) for w in selector])
    figures["selector_projection_cublas_us/B1_S8"] = graph_time_us([lambda w=w: F.linear(x[1:], w) for w in selector])
    return figures


def cycle_matrix_us(shape: TargetShape) -> float:
    """One draft-verify cycle's matrix products at B = 1 (target, drafter, the head twice): a lower bound of a cycle."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            matrix(shape.qkv, shape.hidden),
            matrix(shape.hidden, shape.attention),
            matrix(2 * shape.intermediate, shape.hidden),
            matrix(shape.hidden, shape.intermediate),
        )

    layers = [layer() for _ in range(shape.layers + shape.drafter_layers)]
    head = matrix(VOCABULARY, shape.hidden)
    features = matrix(shape.hidden, 5 * shape.hidden)
    x = matrix(BLOCK, shape.hidden)

    def run() -> Tensor:
        hidden = x
        for qkv, dense, gate_up, down in layers:
            attended = F.linear(F.linear(hidden, qkv)[:, : shape.attention], dense)
            gate, up = F.linear(attended, gate_up).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, down)
        captured = F.linear(x.repeat(1, 5), features)
        return F.linear(hidden + captured, head) + F.linear(hidden, head)

    return graph_time_us([run], 15)


def acceptance(generator: torch.Generator, bandwidth: float) -> dict[str, float]:
    figures = {}

    def case(batch: int, dtype: torch.dtype, temperature: float, flat: bool, **filters: float) -> tuple[float, float]:
        sets = []
        for _ in range(3 if batch > 1 else 8):
            logits = llm_like_logits(generator, batch, BLOCK, dtype)
            if flat:
                logits = (torch.randn(logits.shape, generator=generator, device="cuda") * 2).to(dtype)
            ids = logits[:, :-1].topk(COUNT).indices
            q = torch.softmax(logits[:, :-1].gather(-1, ids).float(), dim=-1)
            sets.append((logits, ids[..., 0].contiguous(), ids, q))
        seeds = torch.arange(batch, device="cuda")
        columns = {
            name: torch.full((batch,), value, device="cuda", dtype=torch.int64 if name == "top_k" else torch.float32)
            for name, value in filters.items()
        }
        temperatures = torch.full((batch,), temperature, device="cuda")
        calls = [lambda s=s: cuda_select.accept(*s, temperatures, seeds, seeds, **columns) for s in sets]
        return graph_time_us(calls * 4), sets[0][0].nbytes / bandwidth * 1e6

    figures["accept_greedy_us"], _ = case(1, torch.float32, 0.0, False)
    figures["accept_greedy_us/B1_S8_bfloat16"], _ = case(1, torch.bfloat16, 0.0, False)
    figures["accept_sampled_us/B1_S8_float32_top_p"], _ = case(1, torch.float32, 1.0, False, top_p=0.95)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"B32_S8_{str(dtype).removeprefix('torch.')}"
        for kind, filters in {
            "plain": {},
            "top_p": {"top_p": 0.95},
            "top_k_top_p_min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
        }.items():
            time, read = case(32, dtype, 1.0, False, **filters)
            figures[f"accept_sampled_us/{name}_{kind}"] = time
            figures[f"accept_sampled_over_read/{name}_{kind}"] = time / read
        time, read = case(32, dtype, 1.0, True, top_p=0.95)
        figures[f"accept_sampled_over_read/{name}_top_p_flat"] = time / read
    figures["accept_sampled_over_read"] = max(
        value
        for key, value in figures.items()
        if key.startswith("accept_sampled_over_read/") and "float32" in key and "flat" not in key
    )
    return figures


def measure() -> dict[str, float]:
    """All figures of this file; keys with a slash are per shape."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = TargetShape()
    bandwidth = copy_bandwidth()
    figures = {"copy_bytes_per_s": bandwidth}
    figures |= candidates_and_walk(generator)
    figures |= convolution(generator, shape)
    figures |= acceptance(generator, bandwidth)
    figures["cycle_matrix_us"] = cycle_matrix_us(shape)
    convs = 2 * shape.drafter_layers  # around attention and around the feed-forward of each layer
    name = f"B1_S{BLOCK}_H{shape.hidden}"
    kernels = convs * (figures[f"conv_in_us/{name}"] + figures[f"conv_out_us/{name}"])
    kernels += figures[f"walk_us/B1_S{BLOCK}_float32"]
    projected = convs * figures[f"conv_both_us/B1_S{BLOCK}"] + figures["selector_projection_us/B1_S8"]
    projected += figures[f"walk_us/B1_S{BLOCK}_float32"]
    figures["conv_selector_cycle_pct"] = 100 * kernels / figures["cycle_matrix_us"]
    figures["conv_selector_with_projections_cycle_pct"] = 100 * projected / figures["cycle_matrix_us"]
    return figures


def main() -> None:
    """Measure, print a table and write ``benchmarks/results/kernels_select.json``."""
    if not torch.cuda.is_available():
        sys.exit("error: needs a CUDA GPU")
    figures = measure()
    width = max(map(len, figures))
    for key, value in figures.items():
        print(f"{key:{width}}  {value:.4g}")
    info = load_library().info
    path = write_result(
        "kernels_select",
        figures,
        shapes={"vocabulary": VOCABULARY, "candidates": COUNT, "rank": RANK, "block_size": BLOCK},
        details={"plugin_library": {"version": info.version, "cuda": info.cuda, "sm": list(info.sm)}},
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

"""TensorRT plans: time, memory and size of builds, and the interpreter's equality. Needs the ``rtx`` extra, no GPU.

``python -m benchmarks.tensorrt [--shapes demo,qwen3_8b,dense_30b]`` writes ``benchmarks/results/tensorrt.json``.
Large shapes have a rank file of the right size and no data: with weights outside the plan a build reads only shapes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.result_file import write_result
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.target_plan import plan_target
from trtllm_dflash.checkpoint.trtllm_config import write_target_config
from trtllm_dflash.config.mapping import ParallelMapping, QuantizationConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.plan_build import run_plan_worker
from trtllm_dflash.engine.plan_worker import PlanJob
from trtllm_dflash.engine.tensorrt_emission import linear_row_tokens
from trtllm_dflash.errors import BuildError
from trtllm_dflash.ops.tensorrt_library import load_tensorrt

TESTS = Path(__file__).parents[1] / "tests"
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


@dataclass(frozen=True)
class Shape:
    """A Qwen3-shaped dense target."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int


SHAPES = {
    "qwen3_8b": Shape(36, 4096, 12288, 32, 8, 151936),
    "dense_30b": Shape(52, 6656, 19968, 32, 2, 151936),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="demo,qwen3_8b,dense_30b", help="which to build")
    wanted = parser.parse_args().shapes.split(",")
    library = load_tensorrt("tensorrt-rtx")
    figures: dict[str, float | bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "demo" in wanted:
            figures |= demo_builds(Path(folder))
            figures |= interpreter_figures(Path(folder))
        for name, shape in SHAPES.items():
            if name in wanted:
                figures |= large_build(Path(folder), name, shape)
    width = max(map(len, figures))
    for key, value in figures.items():
        print(f"{key:{width}}  {value}")
    shapes = {"demo": "30 + 3 layers, bf16, batch 16, 4,096 tokens, S 8"}
    shapes |= {name: f"{shape}, bf16, batch 16, 4,096 tokens, S 16" for name, shape in SHAPES.items()}
    versions = {"tensorrt_rtx": library.version}
    print(write_result("tensorrt", figures, shapes=shapes | {"tensorrt": json.dumps(versions)}))


def demo_builds(folder: Path) -> dict[str, float | bool]:
    """The demo pair's three plans for SM120: bf16 twice, embedded, and with quantised weights."""
    figures: dict[str, float | bool] = {}
    convert("demo", "demo", folder / "bf16", dtype="bfloat16")
    report = build(folder / "bf16", folder / "first", backend="tensorrt-rtx")
    again = build(folder / "bf16", folder / "a-second-directory", backend="tensorrt-rtx")
    assert report.tensorrt is not None
    assert again.tensorrt is not None
    figures["build_s"] = round(min(report.elapsed_s, again.elapsed_s), 1)
    figures["build_peak_mb"] = report.tensorrt.peak_host_mb
    figures["plan_mb"] = round(report.plan_bytes / 1e6, 1)
    figures["plans_reproducible"] = _plan_hashes(folder / "first") == _plan_hashes(folder / "a-second-directory")
    embedded = build(folder / "bf16", folder / "embedded", backend="tensorrt-rtx", weights="embedded")
    assert embedded.tensorrt is not None
    weight_mb = (folder / "bf16" / "target" / "rank0.safetensors").stat().st_size / 1e6
    figures["embedded_build_s"] = round(embedded.elapsed_s, 1)
    figures["embedded_build_peak_mb"] = embedded.tensorrt.peak_host_mb
    figures["embedded_peak_over_weights"] = round(embedded.tensorrt.peak_host_mb / weight_mb, 2)
    figures["embedded_plan_mb"] = round(embedded.plan_bytes / 1e6, 1)
    for algorithm in ("fp8", "nvfp4", "int8"):
        convert("demo", "demo", folder / algorithm, dtype="bfloat16", quantization=algorithm)
        quantised = build(folder / algorithm, folder / f"{algorithm}-engines", backend="tensorrt-rtx")
        figures[f"{algorithm}_build_s"] = round(quantised.elapsed_s, 1)
        figures[f"{algorithm}_plan_mb"] = round(quantised.plan_bytes / 1e6, 1)
    return figures


def interpreter_figures(folder: Path) -> dict[str, float | bool]:
    """Largest relative error of the demo's emitted networks, and 32 greedy tokens through them."""
    sys.path[:0] = [str(TESTS / "tensorrt"), str(TESTS)]
    from driven_sessions import drive, relative_error
    from interpreted_session import interpreted_session
    from tensorrt_requests import native_limits, request_of
    from torch_reference import torch_session

    from trtllm_dflash import LLM, SamplingParams
    from trtllm_dflash.runtime import llm as llm_module

    convert("demo", "demo", folder / "f32", dtype="float32")
    request = request_of(load_tensorrt("tensorrt-rtx"), folder / "f32", limits=native_limits(8, batch=2, seq_len=128))
    prompts = [torch.arange(100, 123), torch.arange(500, 540)]
    found, expected = (
        drive(session, prompts, seed=0, temperatures=torch.tensor([0.0, 0.7]), block_size=8)
        for session in (interpreted_session(request), torch_session(request))
    )
    assert found.draft is not None
    assert expected.draft is not None
    errors = [relative_error(found.draft.q_rows, expected.draft.q_rows)]
    for name in ("prefill_logits", "prefill_features", "verify_logits", "verify_features"):
        errors.append(relative_error(getattr(found, name), getattr(expected, name)))
    errors += [relative_error(mine, theirs) for mine, theirs in zip(found.visible, expected.visible, strict=True)]
    build(folder / "f32", folder / "torch", backend="torch", max_seq_len=128)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    questions = ["What is the capital of France?", "Count from one to ten in words."]
    with LLM(folder / "torch", device="cpu") as llm:
        plain = [output.token_ids for output in llm.generate(questions, params)]
    load_session = llm_module.load_session
    llm_module.load_session = lambda *args, **kwargs: interpreted_session(request)
    try:
        with LLM(folder / "torch") as llm:
            interpreted = [output.token_ids for output in llm.generate(questions, params)]
    finally:
        llm_module.load_session = load_session
    return {"interpreter_max_rel_err": max(errors), "interpreted_tokens_identical": interpreted == plain}


def large_build(folder: Path, name: str, shape: Shape) -> dict[str, float | bool]:
    """The target network of a large shape, bf16, weights outside the plan."""
    config = TargetConfig(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        vocab_size=shape.vocab,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6, 128),
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,) * shape.layers,
        bos_token_id=None,
        eos_token_ids=(151645,),
        pad_token_id=None,
    )
    checkpoint = folder / name
    (checkpoint / "target").mkdir(parents=True)
    write_target_config(checkpoint / "target" / "config.json", config, ParallelMapping(1), QuantizationConfig())
    weight_bytes = write_hollow_rank_file(checkpoint / "target" / "rank0.safetensors", config)
    limits = BuildLimits(16, 4096, 2048, 16, 1)
    limits = BuildLimits(16, 4096, 2048, 16, linear_row_tokens(limits) - 16)
    job = PlanJob(
        backend="tensorrt-rtx",
        network="target",
        lowering="native",
        weights="external",
        checkpoint=str(checkpoint),
        rank=0,
        limits=limits,
        target_sm=(120,),
        file=str(folder / f"{name}.engine"),
        name=f"{name}.engine",
        timing_cache=None,
    )
    try:
        facts, peak_mb = run_plan_worker(job, None)
    except BuildError as problem:
        print(f"{name}: {problem.message}", file=sys.stderr)
        return {f"{name}_builds": False}
    return {
        f"{name}_build_s": facts.build_s,
        f"{name}_build_peak_mb": round(peak_mb, 1),
        f"{name}_plan_mb": round(facts.plan_bytes / 1e6, 1),
        f"{name}_weights_gb": round(weight_bytes / 1e9, 2),
    }


def write_hollow_rank_file(file: Path, config: TargetConfig) -> int:
    """A safetensors file with every tensor of the target and no data in it (a sparse file); bytes it pretends to."""
    header: dict[str, object] = {}
    offset = 0
    for planned in plan_target(config, 1).tensors:
        for spec in planned.specs(torch.bfloat16, "none", 1):
            size = math.prod(spec.shape) * spec.dtype.itemsize
            header[spec.name] = {
                "dtype": _SAFETENSORS_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)
    return offset


def _plan_hashes(engines: Path) -> dict[str, str]:
    return {
        str(file.relative_to(engines)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(engines.rglob("*.engine"))
    }


if __name__ == "__main__":
    main()

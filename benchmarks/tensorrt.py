"""TensorRT plans: time, memory and size of builds, and the interpreter's equality. Needs the ``rtx`` extra, no GPU.

``python -m benchmarks.tensorrt [--parts …] --v1-drafter ../shared/models/smollm2-135m-dflash`` writes
``benchmarks/results/tensorrt.json``. Builds are for SM120.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import tensorrt_bare, tensorrt_shapes
from benchmarks.result_file import write_result
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.demo import demo_target
from trtllm_dflash.engine.build import BuildReport, build
from trtllm_dflash.engine.tensorrt_emission import NetworkRequest
from trtllm_dflash.ops.tensorrt_library import load_tensorrt

TESTS = Path(__file__).parents[1] / "tests"
Figures = dict[str, float | bool]
PARTS = ("demo", "embedded", "quantised", "interpreted", "v1", *tensorrt_shapes.SHAPES)


@dataclass(frozen=True)
class Work:
    """Where to work, and what the user named."""

    folder: Path
    v1_drafter: Path | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what to measure: {', '.join(PARTS)}")
    parser.add_argument("--v1-drafter", type=Path, help="a DFlash 1 drafter of the demo target, for the part v1")
    asked = parser.parse_args()
    library = load_tensorrt("tensorrt-rtx")
    measure = {
        "demo": demo_figures,
        "embedded": embedded_figures,
        "quantised": quantised_figures,
        "interpreted": lambda work: interpreter_figures(work, "demo", ""),
        "v1": v1_figures,
    }
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), asked.v1_drafter)
        for part in asked.parts.split(","):
            if part in measure:
                figures |= measure[part](work)
            else:
                figures |= tensorrt_shapes.shape_figures(work.folder, part)
    width = max(map(len, figures))
    for key, value in figures.items():
        print(f"{key:{width}}  {value}")
    shapes: dict[str, object] = {"demo": "30 + 3 layers, bf16, batch 16, 4,096 tokens, S 8"}
    for name, shape in {**tensorrt_shapes.SHAPES, **tensorrt_shapes.EMBEDDED}.items():
        shapes[name] = f"{shape}, bf16, batch 16, 4,096 tokens, S 16"
    print(
        write_result("tensorrt", figures, shapes=shapes | {"tensorrt": json.dumps({"tensorrt_rtx": library.version})})
    )


def checkpoint(work: Work, dtype: str, *, drafter: str = "demo", quantization: str = "none") -> Path:
    """The demo target with a drafter, converted once."""
    output = work.folder / "-".join(("checkpoint", dtype, Path(drafter).name, quantization))
    if not output.exists():
        convert("demo", drafter, output, dtype=dtype, quantization=quantization)
    return output


def rtx_build(work: Work, source: Path, name: str, **options: Any) -> BuildReport:
    """An engine directory with plans, by its report."""
    return build(source, work.folder / name, backend="tensorrt-rtx", **options)


def peak_mb(report: BuildReport) -> float:
    """Peak host memory of a build with plans."""
    assert report.tensorrt is not None
    return report.tensorrt.peak_host_mb


def demo_figures(work: Work) -> Figures:
    """The demo pair's three plans in bf16, three times over."""
    source = checkpoint(work, "bfloat16")
    names = ("first", "a-second-directory", "third")
    reports = [rtx_build(work, source, name) for name in names]
    hashes = [_plan_hashes(work.folder / name) for name in names]
    return {
        "build_s": round(min(report.elapsed_s for report in reports), 1),
        "build_peak_mb": max(peak_mb(report) for report in reports),
        "build_peak_spread_mb": round(max(map(peak_mb, reports)) - min(map(peak_mb, reports)), 1),
        "plan_mb": round(reports[0].plan_bytes / 1e6, 1),
        "plans_reproducible": hashes.count(hashes[0]) == len(hashes),
    }


def embedded_figures(work: Work) -> Figures:
    """Weights inside the plans, and what TensorRT-RTX takes for the same bytes without our code and torch."""
    source = checkpoint(work, "bfloat16")
    outside, inside = rtx_build(work, source, "outside"), rtx_build(work, source, "inside", weights="embedded")
    weight_mb = (source / "target" / "rank0.safetensors").stat().st_size / 1e6
    figures: Figures = {
        "embedded_build_s": round(inside.elapsed_s, 1),
        "embedded_build_peak_mb": peak_mb(inside),
        "embedded_peak_over_weights": round(peak_mb(inside) / weight_mb, 2),
        "embedded_over_external_peak_over_weights": round((peak_mb(inside) - peak_mb(outside)) / weight_mb, 2),
        "embedded_plan_mb": round(inside.plan_bytes / 1e6, 1),
    }
    demo = tensorrt_shapes.Shape(30, 576, 1536, 9, 3, 49152)
    for name, shape in {"demo": demo, **tensorrt_shapes.EMBEDDED}.items():
        sizes = map(str, (shape.layers, shape.hidden, shape.inner, shape.vocab))
        done = subprocess.run(
            [sys.executable, tensorrt_bare.__file__, *sizes], check=True, capture_output=True, text=True
        )
        facts = json.loads(done.stdout)
        figures[f"bare_{name}_peak_over_constants"] = round(facts["peak_mb"] / facts["constants_mb"], 2)
    for name in tensorrt_shapes.EMBEDDED:
        figures |= tensorrt_shapes.embedded_figures(work.folder, name)
    return figures


def quantised_figures(work: Work) -> Figures:
    """Targets with quantised weights, and drafters, which convert never quantises, beside a plain target."""
    _import_tests()
    from quantised_drafters import write_quantised_drafter

    figures: Figures = {}
    for algorithm in ("fp8", "nvfp4", "int8"):
        report = rtx_build(work, checkpoint(work, "bfloat16", quantization=algorithm), f"{algorithm}-engines")
        figures[f"{algorithm}_build_s"] = round(report.elapsed_s, 1)
        figures[f"{algorithm}_plan_mb"] = round(report.plan_bytes / 1e6, 1)
        drafter = write_quantised_drafter(checkpoint(work, "bfloat16"), work.folder / f"{algorithm}-drafter", algorithm)
        for network in ("inject", "draft"):
            facts, _ = tensorrt_shapes.build_network(
                drafter, network, work.folder / "drafter.engine", weights="external", block_size=8
            )
            figures[f"{algorithm}_drafter_{network}_build_s"] = facts.build_s
            figures[f"{algorithm}_drafter_{network}_plan_mb"] = round(facts.plan_bytes / 1e6, 1)
    return figures


def v1_figures(work: Work) -> Figures:
    """The version 1 demo drafter: its plans, and its networks through the interpreter."""
    if work.v1_drafter is None or not work.v1_drafter.is_dir():
        raise SystemExit(f"--v1-drafter {work.v1_drafter}: no such directory; the part v1 needs a DFlash 1 drafter")
    drafter = str(work.v1_drafter)
    report = rtx_build(work, checkpoint(work, "bfloat16", drafter=drafter), "v1-engines")
    figures: Figures = {
        "v1_build_s": round(report.elapsed_s, 1),
        "v1_build_peak_mb": peak_mb(report),
        "v1_plan_mb": round(report.plan_bytes / 1e6, 1),
    }
    return figures | interpreter_figures(work, drafter, "v1_")


def interpreter_figures(work: Work, drafter: str, prefix: str) -> Figures:
    """Largest relative error of the emitted networks, and 32 greedy tokens through them, in both lowerings."""
    _import_tests()
    from recorded_plugins import recorded
    from tensorrt_requests import native_limits, paged_limits, request_of

    source = checkpoint(work, "float32", drafter=drafter)
    native = request_of(load_tensorrt("tensorrt-rtx"), source, limits=native_limits(8, batch=2, seq_len=128))
    plugin = recorded(replace(native, limits=paged_limits(8, batch=2, seq_len=128)))
    engines = work.folder / f"{prefix}torch-engines"
    build(source, engines, backend="torch", max_seq_len=128)
    figures: Figures = {}
    for name, request in ((prefix, native), (f"{prefix}plugin_", plugin)):
        figures[f"{name}interpreter_max_rel_err"] = largest_error(request)
        figures[f"{name}interpreted_tokens_identical"] = same_tokens(engines, request)
    return figures | (float64_figures(native) if prefix == "" else {})


def largest_error(request: NetworkRequest) -> float:
    """Over every output of every network: logits, features, q rows and what is visible of the caches."""
    from driven_sessions import drive, relative_error
    from interpreted_session import interpreted_session
    from torch_reference import torch_session

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
    return max(errors)


def float64_figures(request: NetworkRequest) -> Figures:
    """How far the captured features are from float64, where float32 is worst: large states that cancel.

    Forty random tokens, of which the first draw all attention; Transformers computes them in float64.
    """
    from driven_sessions import drive, relative_error
    from interpreted_session import interpreted_session
    from torch_reference import torch_session
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(1)
    prompt = [torch.randint(request.target_config.vocab_size, (size,), generator=generator) for size in (23, 1, 40)][2]
    model = AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32).double().eval()
    with torch.no_grad():
        states = model(prompt[None], output_hidden_states=True).hidden_states
    exact = torch.cat([states[layer + 1][0] for layer in request.drafter_facts.target_layer_ids], -1)
    sessions = {"torch": torch_session(request), "interpreted": interpreted_session(request)}
    observed = {
        name: drive(session, [prompt], seed=1, temperatures=torch.zeros(1), block_size=8)
        for name, session in sessions.items()
    }
    caches = zip(observed["interpreted"].visible, observed["torch"].visible, strict=True)
    return {
        **{f"{name}_error_to_float64": relative_error(one.prefill_features, exact) for name, one in observed.items()},
        "cancelling_states_max_rel_err": max(relative_error(mine, theirs) for mine, theirs in caches),
    }


def same_tokens(engines: Path, request: NetworkRequest) -> bool:
    """Whether 32 greedy tokens of two prompts are the same on the torch backend and through the networks."""
    from interpreted_session import interpreted_session

    from trtllm_dflash.runtime import llm as llm_module

    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    questions = ["What is the capital of France?", "Count from one to ten in words."]
    with LLM(engines, device="cpu") as llm:
        plain = [output.token_ids for output in llm.generate(questions, params)]
    load_session = llm_module.load_session
    llm_module.load_session = lambda *args, **kwargs: interpreted_session(request)
    try:
        with LLM(engines) as llm:
            return [output.token_ids for output in llm.generate(questions, params)] == plain
    finally:
        llm_module.load_session = load_session


def _import_tests() -> None:
    sys.path[:0] = [str(TESTS / "tensorrt"), str(TESTS)]


def _plan_hashes(engines: Path) -> dict[str, str]:
    return {
        str(file.relative_to(engines)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(engines.rglob("*.engine"))
    }


if __name__ == "__main__":
    main()

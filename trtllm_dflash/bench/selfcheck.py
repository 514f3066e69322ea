"""``selfcheck``: does this installation compute what the torch backend computes, and how fast.

Every subject (a backend, how it is built, a dtype) is built, run pass by pass and run in the runtime. The reference is
the torch backend: in float32 for what is right, and in the subject's own dtype for how much of a difference rounding
makes. The document holds no prompts, no paths and no names of hosts: it is made to be attached to an issue.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.bench.machine import machine_facts
from trtllm_dflash.bench.selfcheck_generation import Generated, agreement, generate_greedily
from trtllm_dflash.bench.selfcheck_passes import COMPARED, Passes, equal_drafts, relative_errors, run_passes
from trtllm_dflash.config.typed_json import to_json
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.torch_session import KernelChoice
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.prompting import Prompt, PromptEncoder
from trtllm_dflash.serving.engine_server import without_paths

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PROMPTS = (
    "What is 17 times 23? Show each step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A farmer has 12 sheep, sells 5 and buys 9. How many are there now?",
    "Explain in three sentences why the sky is blue.",
    "List the planets of the solar system from the sun outwards.",
    "Natalia reads 14 pages a day. How many pages does she read in three weeks?",
    "Write a short poem about the sea in winter.",
    "Sort these words by length: tree, sun, elephant, river, cloud.",
)
LIMITS = {"max_batch_size": 8, "max_seq_len": 512, "max_num_tokens": 512}

# How far from float32 a subject may be, in units of what torch itself loses in that dtype. TensorRT rounds in other
# places than torch (fused norms, other sums): as much again is expected, three times is a mistake.
ROUNDING_FACTOR = 3.0
# float32 subjects may multiply in TF32 (10 bits of mantissa), about 5e-4 per product; sums over 30 layers make it more.
FLOAT32_ERROR = 5e-3
# Two best tokens closer than this are a tie: the logits' own error in that dtype, on both of them, with a margin.
TIE_FACTOR = 8.0

CheckpointOf = Callable[[str], Path]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        name: for people. backend, build_options: as ``build`` takes them. dtype: of the pair.
        kernels: as ``LLM`` takes them. needs: a Python module without which it is skipped.
        needs_gpu, needs_plugins: likewise.
    """

    name: str
    backend: str
    dtype: str
    build_options: dict[str, Any] = field(default_factory=dict)
    kernels: KernelChoice = "auto"
    needs: str | None = None
    needs_gpu: bool = True
    needs_plugins: bool = False


SUBJECTS = (
    Subject("torch, plugin kernels, bfloat16", "torch", "bfloat16", kernels="plugins", needs_plugins=True),
    Subject(
        "TensorRT, plugin layers, bfloat16",
        "tensorrt",
        "bfloat16",
        {"lowering": "plugin"},
        needs="tensorrt",
        needs_plugins=True,
    ),
    Subject("TensorRT, native layers, float32", "tensorrt", "float32", {"lowering": "native"}, needs="tensorrt"),
    Subject("TensorRT, native layers, bfloat16", "tensorrt", "bfloat16", {"lowering": "native"}, needs="tensorrt"),
    Subject("TensorRT-RTX, native layers, bfloat16", "tensorrt-rtx", "bfloat16", needs="tensorrt_rtx"),
)


def run_selfcheck(
    checkpoint_of: CheckpointOf,
    workdir: Path,
    *,
    subjects: Sequence[Subject] = SUBJECTS,
    device: str | None = None,
    max_tokens: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check every subject and the reference itself; returns the document.

    Args:
        checkpoint_of: dtype name → a converted pair with a drafter.
        workdir: for engine directories, a few hundred MB each.
        device: of everything; None takes the first GPU, else the CPU. max_tokens: output of a request.
        progress: told (what, subjects done, subjects in all).
    """
    begun = time.perf_counter()
    check = _Selfcheck(checkpoint_of, workdir, device, max_tokens)
    checks = []
    for number, subject in enumerate((None, *subjects)):
        if progress is not None:
            progress("torch, the reference" if subject is None else subject.name, number, len(subjects) + 1)
        checks.append(check.reference() if subject is None else check.subject(subject))
    states = [one["status"] for one in checks]
    return {
        "kind": "selfcheck",
        "schema_version": SCHEMA_VERSION,
        "verdict": "failed" if "failed" in states else "passed",
        "passed": states.count("passed"),
        "failed": states.count("failed"),
        "skipped": states.count("skipped"),
        "device": check.device.type,
        "requests": len(PROMPTS),
        "max_tokens": max_tokens,
        "checks": checks,
        "machine": machine_facts(),
        "seconds": round(time.perf_counter() - begun, 1),
    }


class _Selfcheck:
    """The reference, made once per dtype, and each subject against it."""

    def __init__(self, checkpoint_of: CheckpointOf, workdir: Path, device: str | None, max_tokens: int) -> None:
        self.device = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self._checkpoint_of, self._workdir, self._max_tokens = checkpoint_of, workdir, max_tokens
        self._engines: dict[str, Path] = {}
        self._passes: dict[str, Passes] = {}
        self._generated: dict[tuple[str, str], Generated] = {}

    def reference(self) -> dict[str, Any]:
        """torch in float32: speculation must not change its tokens."""

        def compare(facts: dict[str, Any]) -> list[str]:
            on, off = self._reference_outputs("float32", "on"), self._reference_outputs("float32", "off")
            tokens = agreement(on, off, tie_nats=1e-4)
            facts["tokens_speculation_on_off"] = to_json(tokens)
            facts["speed"] = _speeds(on, off)
            facts["acceptance_length"] = on.acceptance_length
            return [f"{tokens.unexplained} of {tokens.requests} outputs change with speculation"] * bool(
                tokens.unexplained
            )

        return self._guarded({"name": "torch, the reference", "backend": "torch", "dtype": "float32"}, compare)

    def subject(self, subject: Subject) -> dict[str, Any]:
        """One subject: build, passes, generation."""
        facts: dict[str, Any] = {"name": subject.name, "backend": subject.backend, "dtype": subject.dtype}
        missing = self._missing(subject)
        if missing is not None:
            return facts | {"status": "skipped", "why": missing}

        def compare(facts: dict[str, Any]) -> list[str]:
            engines = self._build(subject, facts)
            return [*self._compare_passes(subject, engines, facts), *self._compare_generation(subject, engines, facts)]

        return self._guarded(facts, compare)

    def _missing(self, subject: Subject) -> str | None:
        if subject.needs is not None and importlib.util.find_spec(subject.needs) is None:
            return f"the Python package {subject.needs} is not installed"
        if subject.needs_gpu and self.device.type != "cuda":
            return "needs a CUDA GPU; this ran on the CPU"
        if subject.needs_plugins and find_library() is None:
            return "the plugin library is not built (trtllm-dflash plugins build)"
        return None

    def _guarded(self, facts: dict[str, Any], compare: Callable[[dict[str, Any]], list[str]]) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            problems = compare(facts)
        except DFlashError as error:
            logger.debug("%s", facts["name"], exc_info=True)
            problems = [f"{type(error).__name__}: {error.message}"]
        except Exception as error:
            # A crash of TensorRT or a kernel is what this command is run to find: it is a result.
            logger.debug("%s", facts["name"], exc_info=True)
            problems = [f"{type(error).__name__}: {error}"]
        facts["seconds"] = round(time.perf_counter() - begun, 1)
        facts["status"] = "failed" if problems else "passed"
        if problems:
            facts["why"] = "; ".join(_anonymous(problem) for problem in problems)
        return facts

    def _build(self, subject: Subject, facts: dict[str, Any]) -> Path:
        if subject.backend == "torch" and not subject.build_options:
            return self._torch_engines(subject.dtype)
        engines = self._workdir / "-".join([subject.backend, subject.dtype, *map(str, subject.build_options.values())])
        report = build(
            self._checkpoint_of(subject.dtype),
            engines,
            backend=subject.backend,
            force=True,
            **LIMITS,  # type: ignore[arg-type]
            **subject.build_options,
        )
        facts["build_s"] = round(report.elapsed_s, 1)
        facts["plan_mb"] = round(report.plan_bytes / 1e6, 1)
        return engines

    def _compare_passes(self, subject: Subject, engines: Path, facts: dict[str, Any]) -> list[str]:
        exact = self._reference_passes("float32")
        found = self._run_passes(engines, subject.kernels, exact)
        errors = relative_errors(found, exact)
        allowed = dict.fromkeys(errors, FLOAT32_ERROR)
        if subject.dtype != "float32":
            rounding = relative_errors(self._reference_passes(subject.dtype, exact), exact)
            allowed = {name: ROUNDING_FACTOR * rounding[name] for name in errors}
        facts["passes"] = {name: {"error": errors[name], "allowed": allowed[name]} for name in errors}
        facts["not_compared"] = [name for name in COMPARED if name not in errors]
        facts["equal_drafts"] = equal_drafts(found, exact)
        # Written so that NaN is a problem too.
        return [
            f"{name} is off by {error:.2e} of its size, expected at most {allowed[name]:.2e}"
            for name, error in errors.items()
            if not error <= allowed[name]
        ]

    def _compare_generation(self, subject: Subject, engines: Path, facts: dict[str, Any]) -> list[str]:
        on, off = (self._outputs(engines, mode, subject.kernels) for mode in ("on", "off"))
        expected = self._reference_outputs(subject.dtype, "off")
        tie = TIE_FACTOR * self._logit_error(subject.dtype)
        problems = []
        for name, found in (("speculation", on), ("plain", off)):
            tokens = agreement(found, expected, tie)
            facts[f"tokens_{name}"] = to_json(tokens) | {"tie_nats": tie}
            if tokens.unexplained:
                problems.append(f"{tokens.unexplained} of {tokens.requests} outputs ({name}) are not the reference's")
        reference = self._reference_outputs(subject.dtype, "on")
        facts["acceptance_length"], facts["acceptance_length_reference"] = (
            on.acceptance_length,
            reference.acceptance_length,
        )
        facts["speed"] = _speeds(on, off)
        facts["speed_reference"] = _speeds(reference, expected)
        problems += _acceptance_problem(on, reference)
        return problems

    def _logit_error(self, dtype: str) -> float:
        """Typical error of a logit in ``dtype``: of float32's last bits, or what torch loses against float32."""
        exact = self._reference_passes("float32")
        size = float(exact.verify_logits.square().mean().sqrt())
        if dtype == "float32":
            return size * FLOAT32_ERROR / TIE_FACTOR
        rounded = self._reference_passes(dtype, exact)
        return float((rounded.verify_logits - exact.verify_logits).square().mean().sqrt())

    def _reference_passes(self, dtype: str, given: Passes | None = None) -> Passes:
        if dtype not in self._passes:
            self._passes[dtype] = self._run_passes(self._torch_engines(dtype), "torch", given)
        return self._passes[dtype]

    def _reference_outputs(self, dtype: str, speculation: str) -> Generated:
        if (dtype, speculation) not in self._generated:
            outputs = self._outputs(self._torch_engines(dtype), speculation, "torch")
            self._generated[dtype, speculation] = outputs
        return self._generated[dtype, speculation]

    def _torch_engines(self, dtype: str) -> Path:
        if dtype not in self._engines:
            engines = self._workdir / f"torch-{dtype}"
            build(self._checkpoint_of(dtype), engines, backend="torch", force=True, **LIMITS)  # type: ignore[arg-type]
            self._engines[dtype] = engines
        return self._engines[dtype]

    def _run_passes(self, engines: Path, kernels: KernelChoice, given: Passes | None) -> Passes:
        session = load_session(engines, device=str(self.device), kernels=kernels)
        try:
            encoder = PromptEncoder(engines / "tokenizer", session.target_config.vocab_size)
            return run_passes(session, [encoder.encode(prompt) for prompt in PROMPTS], given)
        finally:
            session.close()

    def _outputs(self, engines: Path, speculation: str, kernels: KernelChoice) -> Generated:
        with LLM(engines, speculation=speculation, device=str(self.device), kernels=kernels) as llm:  # type: ignore[arg-type]
            prompts: list[Prompt] = list(PROMPTS)
            if llm.has_chat_template:
                prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
            generate_greedily(llm, prompts[:2], 8)
            return generate_greedily(llm, prompts, self._max_tokens)


def _speeds(on: Generated, off: Generated) -> dict[str, float]:
    return {
        f"{name}_batch_{size}_tok_s": round(generated.tok_s[size], 2)
        for name, generated in (("speculation", on), ("plain", off))
        for size in generated.tok_s
    }


def _acceptance_problem(found: Generated, expected: Generated) -> list[str]:
    """Acceptance lengths may differ by three standard errors of their difference: texts that part differ in it too."""
    a, b = found.acceptance_length, expected.acceptance_length
    if a is None or b is None:
        return ["no draft-verify cycle ran"]
    allowed = 3 * (found.acceptance_error() ** 2 + expected.acceptance_error() ** 2) ** 0.5
    if abs(a - b) <= allowed:
        return []
    return [f"acceptance length is {a:.2f}, expected the reference's {b:.2f} within {allowed:.2f}"]


def _anonymous(text: str) -> str:
    cleaned = without_paths(text)
    host = platform.node()
    return cleaned.replace(host, "<host>") if host else cleaned

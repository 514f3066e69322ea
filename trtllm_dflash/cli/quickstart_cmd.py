"""``trtllm-dflash quickstart``: the whole main job on the demo pair."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from trtllm_dflash.cli.generate_cmd import warn_of_cuts
from trtllm_dflash.cli.progress_bar import plan_progress, progress_bar

if TYPE_CHECKING:
    from trtllm_dflash.engine.plan_facts import Network
    from trtllm_dflash.runtime.outputs import RequestOutput

_PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
)

_NETWORKS: tuple[Network, ...] = ("target", "inject", "draft")


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="Use this prompt instead of the built-in ones; repeatable.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Output tokens of each.")
@click.option(
    "--workdir", type=click.Path(path_type=Path), help="Where the directories go.  [default: the user's cache]"
)
@click.option("--no-triton", is_flag=True, help="Stop before the Triton part.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def quickstart(prompts: tuple[str, ...], max_tokens: int, workdir: Path | None, no_triton: bool, as_json: bool) -> None:
    """The whole main job on the demo pair, on any machine.

    Converts SmolLM2-135M-Instruct and its DFlash 2 drafter, builds engines, generates with and without speculation,
    deploys to a real Triton Inference Server, streams one request and stops it again. With TensorRT-RTX installed
    (extra rtx) it also builds the pair's Blackwell plans, which needs no GPU.

    \b
    Example:
      trtllm-dflash quickstart --prompt "What is 17 * 23?"
    """
    started = time.perf_counter()
    run = _Run(as_json)
    chosen = list(prompts or _PROMPTS)
    run.prepare(workdir)
    run.convert_and_build()
    run.compare(chosen, max_tokens)
    run.build_plans()
    if no_triton:
        run.skip_triton("--no-triton was given")
    else:
        run.serve(chosen[0], max_tokens)
    run.facts["quickstart_s"] = round(time.perf_counter() - started, 1)
    run.finish()


class _Run:
    """The steps, each of which prints what it did and records its facts."""

    def __init__(self, as_json: bool) -> None:
        self.facts: dict[str, Any] = {}
        self._as_json = as_json
        self._errors = Console(stderr=True)
        self._first_output: RequestOutput | None = None

    def prepare(self, workdir: Path | None) -> None:
        from trtllm_dflash.checkpoint.demo import cache_directory, demo_target

        with self._step("demo target", spinner=False), progress_bar() as progress:
            demo_target(progress)
        self._workdir = cache_directory() / "quickstart" if workdir is None else workdir
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._say(f"directories are kept in {self._workdir}")

    def convert_and_build(self) -> None:
        from trtllm_dflash.checkpoint.convert import convert
        from trtllm_dflash.engine.build import build

        checkpoint, engines = self._workdir / "checkpoint", self._workdir / "engines"
        with self._step("convert", spinner=False), progress_bar() as progress:
            report = convert("demo", "demo", checkpoint, force=True, progress=progress)
        self.facts["convert_peak_mb"] = round(report.peak_host_mb, 1)
        with self._step("build"):
            built = build(checkpoint, engines, force=True)
        self._engines = engines
        self._say(
            f"engines: backend {built.backend}, block size {built.limits.block_size}, "
            f"up to {built.limits.max_batch_size} requests of {built.limits.max_seq_len} tokens"
        )

    def compare(self, prompts: list[str], max_tokens: int) -> None:
        """Greedy generation with and without speculation, one request at a time."""
        from trtllm_dflash.config.sampling import SamplingParams
        from trtllm_dflash.runtime.llm import LLM

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs: dict[str, list[RequestOutput]] = {}
        rates: dict[str, float] = {}
        for mode in ("on", "off"):
            with self._step(f"generate, speculation {mode}"), LLM(self._engines, speculation=mode) as llm:  # type: ignore[arg-type]
                llm.generate("Hello", SamplingParams(max_tokens=8, temperature=0.0))
                begun = time.perf_counter()
                outputs[mode] = [llm.generate([_chat(prompt)], params)[0] for prompt in prompts]
                elapsed = time.perf_counter() - begun
                rates[mode] = sum(len(output.token_ids) for output in outputs[mode]) / elapsed
        warn_of_cuts(outputs["on"])
        for prompt, output in zip(prompts, outputs["on"], strict=True):
            self._say(f"\n> {prompt}\n{output.text.strip()}")
        cycles = sum(output.metrics.cycles for output in outputs["on"])
        accepted = sum(output.metrics.accepted_tokens for output in outputs["on"])
        identical = [o.token_ids for o in outputs["on"]] == [o.token_ids for o in outputs["off"]]
        self.facts |= {
            "tokens_per_second_speculation": round(rates["on"], 2),
            "tokens_per_second_plain": round(rates["off"], 2),
            "speedup": round(rates["on"] / rates["off"], 2),
            "acceptance_length": round((accepted + cycles) / cycles, 3) if cycles else None,
            "outputs_identical": identical,
        }
        self._first_output = outputs["on"][0]
        self._say(
            f"\nwith speculation    {rates['on']:7.1f} tokens/s   "
            f"acceptance length {self.facts['acceptance_length']}\n"
            f"without speculation {rates['off']:7.1f} tokens/s   speedup {self.facts['speedup']}\n"
            f"outputs {'identical' if identical else 'DIFFER'}"
        )

    def build_plans(self) -> None:
        """TensorRT plans for SM 120, where TensorRT-RTX is installed; they are built here and not run."""
        from trtllm_dflash.checkpoint.convert import convert
        from trtllm_dflash.engine.build import build
        from trtllm_dflash.engine.plan_build import read_plan_facts

        if importlib.util.find_spec("tensorrt_rtx") is None:
            self.facts["tensorrt"] = {"skipped": "tensorrt-rtx is not installed"}
            self._say('TensorRT plans skipped: TensorRT-RTX is not installed (pip install "trtllm-dflash[rtx]")')
            return
        checkpoint, engines = self._workdir / "checkpoint-bf16", self._workdir / "engines-sm120"
        with self._step("TensorRT-RTX plans for SM 120", spinner=False), plan_progress("building plans …") as progress:
            convert("demo", "demo", checkpoint, dtype="bfloat16", force=True)
            report = build(checkpoint, engines, backend="tensorrt-rtx", target_sm=(120,), force=True, progress=progress)
        plans = {name: read_plan_facts(engines, name, 0) for name in _NETWORKS}
        self.facts["tensorrt"] = {
            name: {
                "build_s": plan.build_s,
                "plan_mb": round(plan.plan_bytes / 1e6, 1),
                "layers": sum(entry.count for entry in plan.layers),
            }
            for name, plan in plans.items()
        }
        self._say(f"TensorRT-RTX plans for SM 120 in {report.elapsed_s:.0f} s (built, not run here):")
        for name, facts in self.facts["tensorrt"].items():
            self._say(f"  {name:7s} {facts['layers']:5d} layers, {facts['plan_mb']:6.1f} MB, {facts['build_s']:5.1f} s")

    def serve(self, prompt: str, max_tokens: int) -> None:
        """Deploy to a real tritonserver, stream one request, stop."""
        from trtllm_dflash.errors import ConfigError
        from trtllm_dflash.serving.repository import deploy
        from trtllm_dflash.serving.triton_install import find_tritonserver
        from trtllm_dflash.serving.tritonserver import triton_server

        try:
            find_tritonserver()
        except ConfigError as error:
            self.skip_triton(f"{error.message}; {error.hint}" if error.hint else error.message)
            return
        repository = self._workdir / "triton_models"
        with self._step("deploy"):
            deploy(self._engines, repository, force=True)
        with self._step("Triton up, one streamed request, down"):
            log = self._workdir / "triton.log"
            with triton_server(repository, log=log) as server:
                text = self._stream(server.client(), prompt, max_tokens)
                url = server.http_url
        same = self._first_output is not None and text == self._first_output.text
        self.facts["triton"] = {"streamed_text_equals_generate": same}
        self._say(f"streamed from {url}: text {'equal to' if same else 'DIFFERENT from'} the in-process one")

    def _stream(self, client: Any, prompt: str, max_tokens: int) -> str:
        from trtllm_dflash.runtime.prompting import PromptEncoder

        encoder = PromptEncoder(self._engines / "tokenizer", vocab_size=1 << 31)
        ids = list(encoder.encode(_chat(prompt)))
        events = client.generate_stream(input_ids=ids, max_tokens=max_tokens, temperature=0.0)
        return "".join(str(event["text_output"]) for event in events)

    def skip_triton(self, why: str) -> None:
        """Say that the Triton part was not run."""
        self.facts["triton"] = {"skipped": why}
        self._say(f"Triton part skipped: {why}")

    def finish(self) -> None:
        """Print the outcome; a difference between outputs is a failure."""
        if self._as_json:
            click.echo(json.dumps(self.facts))
        else:
            self._say(f"quickstart done in {self.facts['quickstart_s']} s")
            self._say(f"next: trtllm-dflash generate -e {self._engines} --prompt 'Hello'")
        served = self.facts["triton"].get("streamed_text_equals_generate", True)
        if not (self.facts["outputs_identical"] and served):
            raise SystemExit(1)

    @contextmanager
    def _step(self, name: str, *, spinner: bool = True) -> Iterator[None]:
        begun = time.perf_counter()
        if spinner and self._errors.is_terminal:
            with self._errors.status(f"{name} …"):
                yield
        else:
            yield
        elapsed = time.perf_counter() - begun
        self.facts[f"{name.split(',')[0].replace(' ', '_').lower()}_s"] = round(elapsed, 2)
        click.echo(f"[{elapsed:6.1f} s] {name}", err=True)

    def _say(self, text: str) -> None:
        click.echo(text, err=self._as_json)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]

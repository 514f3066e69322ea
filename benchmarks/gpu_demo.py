"""The trained demo pair on a GPU: exactness, acceptance, speed against the public reference, adaptive block size."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.datasets import load_prompts
from trtllm_dflash.checkpoint.demo import demo_drafter, demo_target
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.outputs import OutputChunk, RequestOutput

# Two logits this close may change places when a sum is taken in another order: bfloat16 keeps 8 bits, logits reach 32,
# so this is two steps; a thousandth covers the float32 of the logarithms.
_TIE = 0.25 * 1.001
# A run of every prompt is over in a moment with few users, and one pause of the host would show.
_LEAST_WINDOW_S = 0.6
Ids = tuple[int, ...]


def exactness_figures(
    engines: Path,
    float32_engines: Path,
    prompts_file: Path,
    *,
    count: int,
    eager_count: int,
    max_tokens: int,
    device: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``demo_greedy_identical`` and ``demo_acceptance_rel_diff``. Eager runs, which are slow, take fewer prompts.

    A prompt counts as identical when its texts with speculation on and off, by graphs and eagerly, are equal, or part
    where plain decoding's two best tokens are within a rounding of each other (those are counted apart). Acceptance is
    compared with float32 on a CPU over what their texts share: texts that part have acceptance lengths of their own.
    """
    messages = load_prompts(prompts_file, count)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    texts: dict[str, list[Ids]] = {}
    acceptance: dict[str, float] = {}
    cycles: dict[str, list[list[int]]] = {}
    for speculation in ("off", "on"):
        for graphs in (True, False):
            options = EngineOptions(graphs=graphs, adaptive=False)
            with LLM(
                engines, device=device, speculation=speculation, options=options, kernels="plugins", prefix_cache=False
            ) as llm:
                prompts = [llm.encode(message) for message in messages]
                name = f"{speculation}-{'graph' if graphs else 'eager'}"
                alone = [_traced(llm, [ids], params) for ids in prompts[: count if graphs else eager_count]]
                outputs = [one for some, _ in alone for one in some]
                cycles[name] = [one for _, some in alone for one in some]
                print(name, len(outputs), "prompts", flush=True)
                texts[name] = [output.token_ids for output in outputs]
                acceptance[name] = _pooled(outputs)
    ties, unexplained = [], []
    with LLM(engines, device=device, speculation="off", kernels="plugins", prefix_cache=False) as plain:
        for name, those in texts.items():
            for index, (text, base) in enumerate(zip(those, texts["off-graph"], strict=False)):
                if text == base:
                    continue
                gap = _gap_at_parting(plain, prompts[index], text, base)
                (ties if gap <= _TIE else unexplained).append({"setting": name, "prompt": index, "gap": gap})
    with LLM(float32_engines, device="cpu", speculation="on", prefix_cache=False) as on_cpu:
        outputs, cycles["cpu"] = _traced(on_cpu, prompts, params)
    texts["cpu"], acceptance["cpu-float32"] = [output.token_ids for output in outputs], _pooled(outputs)
    shared = [_shared(a, b) for a, b in zip(texts["on-graph"], texts["cpu"], strict=True)]
    parted = {entry["prompt"] for entry in unexplained}
    ours, cpu = (_acceptance_within(cycles[name], shared) for name in ("on-graph", "cpu"))
    return {
        "demo_greedy_identical": 1 - len(parted) / count,
        "demo_acceptance_rel_diff": abs(ours - cpu) / cpu,
    }, {
        "prompts": count,
        "max_tokens": max_tokens,
        "acceptance": acceptance,
        "acceptance_where_texts_agree": {"on-graph": ours, "cpu-float32": cpu, "tokens": sum(shared)},
        "texts_equal_to_the_last_token": {
            name: [sum(a == b for a, b in zip(those, texts["off-graph"], strict=False)), len(those)]
            for name, those in texts.items()
            if name != "cpu"
        },
        "ties": ties,
        "unexplained": unexplained,
    }


def _traced(llm: LLM, prompts: Sequence[Ids], params: SamplingParams) -> tuple[list[RequestOutput], list[list[int]]]:
    """Outputs, and for each the tokens that came at a time: of the prompt's pass, then of every cycle."""
    steps: list[list[int]] = [[] for _ in prompts]

    def note(index: int, chunk: OutputChunk) -> None:
        if chunk.token_ids:
            steps[index].append(len(chunk.token_ids))

    outputs = llm.generate([list(ids) for ids in prompts], params, on_chunk=note)
    return outputs, steps


def _acceptance_within(cycles: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Tokens per cycle of the cycles that lie wholly in the first ``lengths[i]`` tokens of text i."""
    tokens = count = 0
    for steps, length in zip(cycles, lengths, strict=True):
        reached = steps[0]
        for step in steps[1:]:
            reached += step
            if reached > length:
                break
            tokens, count = tokens + step, count + 1
    return tokens / max(1, count)


def _shared(a: Ids, b: Ids) -> int:
    """How many tokens two texts begin with in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _pooled(outputs: Sequence[Any]) -> float:
    committed = sum(output.metrics.accepted_tokens + output.metrics.cycles for output in outputs)
    return committed / max(1, sum(output.metrics.cycles for output in outputs))


def _gap_at_parting(plain: LLM, prompt: Ids, text: Ids, base: Ids) -> float:
    """Difference of the two tokens' log-probabilities where two texts part, by a prefill of what they share."""
    shared = _shared(text, base)
    if shared == min(len(text), len(base)):
        return float("inf")
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    top = dict(plain.generate([[*prompt, *base[:shared]]], params)[0].logprobs[0].top)
    if text[shared] not in top or base[shared] not in top:
        return float("inf")
    return abs(top[text[shared]] - top[base[shared]])


def speed_figures(
    engines: Path, prompts_file: Path, *, count: int, max_tokens: int, repeats: int, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``over_reference`` and ``over_transformers``: tokens/s ratios at batch 1, settings interleaved."""
    import dflash.model as reference
    from transformers import AutoModelForCausalLM

    messages = load_prompts(prompts_file, count)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    arguments = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(demo_target(), **arguments).to(device).eval()
    drafter = reference.DFlash2DraftModel.from_pretrained(demo_drafter(), **arguments).to(device).eval()
    with (
        LLM(engines, device=device, speculation="on", kernels="plugins", prefix_cache=False) as speculative,
        LLM(engines, device=device, speculation="off", kernels="plugins", prefix_cache=False) as plain,
    ):
        prompts = [plain.encode(message) for message in messages]

        def ours(llm: LLM) -> int:
            return sum(len(llm.generate([ids], params)[0].token_ids) for ids in prompts)

        def by_reference() -> int:
            total = 0
            for ids in prompts:
                given = torch.tensor([ids], device=device)
                output = reference.dflash_generate(drafter, model, given, max_tokens, [2])
                total += output.shape[1] - len(ids)
            return total

        @torch.inference_mode()
        def by_transformers() -> int:
            total = 0
            for ids in prompts:
                given = torch.tensor([ids], device=device)
                output = model.generate(given, max_new_tokens=max_tokens, do_sample=False, eos_token_id=2)
                total += output.shape[1] - len(ids)
            return total

        settings: dict[str, Callable[[], int]] = {
            "speculation": lambda: ours(speculative),
            "plain": lambda: ours(plain),
            "reference": by_reference,
            "transformers": by_transformers,
        }
        rates: dict[str, list[float]] = {name: [] for name in settings}
        for run in settings.values():
            run()
        for _ in range(repeats):
            for name, run in settings.items():
                begun = time.perf_counter()
                tokens = run()
                torch.cuda.synchronize()
                rates[name].append(tokens / (time.perf_counter() - begun))
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:16s} {median[name]:9.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})", flush=True)
    return {
        "over_reference": median["speculation"] / median["reference"],
        "over_transformers": median["plain"] / median["transformers"],
        "speculation_over_transformers": median["speculation"] / median["transformers"],
    }, {"prompts": count, "max_tokens": max_tokens, "tokens_per_second": rates}


def _tokens_per_second(llm: LLM, prompts: Sequence[Any], params: SamplingParams, *, at_least_s: float) -> float:
    """Of all prompts at once, again and again until ``at_least_s`` have passed."""
    begun, tokens = time.perf_counter(), 0
    while True:
        tokens += sum(len(output.token_ids) for output in llm.generate(prompts, params))
        elapsed = time.perf_counter() - begun
        if elapsed >= at_least_s:
            return tokens / elapsed


def adaptive_figures(
    engines: Path, prompts_file: Path, *, concurrencies: Sequence[int], max_tokens: int, repeats: int, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``adaptive_min_ratio``: tokens/s of ``auto`` over the better of on and off, the least over concurrencies."""
    messages = load_prompts(prompts_file, max(concurrencies))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    llms = {
        mode: LLM(engines, device=device, speculation=mode, kernels="plugins", prefix_cache=False)
        for mode in ("auto", "on", "off")
    }
    details: dict[str, Any] = {}
    worst = float("inf")
    # What has been loaded stays: a collection that walks through all of it takes as long as several cycles.
    gc.collect()
    gc.freeze()
    try:
        for concurrency in concurrencies:
            rates: dict[str, list[float]] = {mode: [] for mode in llms}
            prompts = [llms["off"].encode(message) for message in messages[:concurrency]]
            for repeat in range(repeats + 1):
                # In turn, and the other way round every other time: the host's speed drifts.
                for mode in list(llms)[:: 1 if repeat % 2 else -1]:
                    if _is_far_behind(mode, rates):
                        continue
                    rate = _tokens_per_second(llms[mode], prompts, params, at_least_s=_LEAST_WINDOW_S if repeat else 0)
                    if repeat:
                        rates[mode].append(rate)
            median = {mode: statistics.median(values) for mode, values in rates.items()}
            ratio = median["auto"] / max(median["on"], median["off"])
            worst = min(worst, ratio)
            details[str(concurrency)] = {"tokens_per_second": rates, "ratio": ratio}
            print(f"{concurrency:4d}: {median} ratio {ratio:.3f}", flush=True)
    finally:
        gc.unfreeze()
        for llm in llms.values():
            llm.close()
    settings = {"max_tokens": max_tokens, "least_window_s": _LEAST_WINDOW_S}
    return {"adaptive_min_ratio": worst}, {**settings, "concurrency": details}


def _is_far_behind(mode: str, rates: dict[str, list[float]]) -> bool:
    """Whether three runs have shown that a setting is not the better of on and off: it is not timed again."""
    other = {"on": "off", "off": "on"}.get(mode)
    if other is None or not len(rates[mode]) == 3 <= len(rates[other]):
        return False
    return 1.5 * statistics.median(rates[mode]) < statistics.median(rates[other][:3])


def fp8_accuracy_figures(
    engines: Path, fp8_engines: Path, prompts_file: Path, *, count: int, max_tokens: int, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What FP8 weights and cache of the target cost: how long its greedy texts stay bfloat16's, and acceptance.

    ``demo_fp8_first_difference``: mean share of a text before the first different token, plain decoding.
    ``demo_fp8_acceptance_ratio``: acceptance length over bfloat16's.
    """
    messages = load_prompts(prompts_file, count)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    texts: dict[str, list[Ids]] = {}
    acceptance: dict[str, float] = {}
    for name, path in (("bfloat16", engines), ("fp8", fp8_engines)):
        with LLM(path, device=device, speculation="off", kernels="plugins", prefix_cache=False) as plain:
            prompts = [list(plain.encode(message)) for message in messages]
            texts[name] = [output.token_ids for output in plain.generate(prompts, params)]
        with LLM(path, device=device, speculation="on", kernels="plugins", prefix_cache=False) as speculative:
            acceptance[name] = _pooled(speculative.generate(prompts, params))
    shares = []
    for exact, rounded in zip(texts["bfloat16"], texts["fp8"], strict=True):
        same = next((n for n, (a, b) in enumerate(zip(exact, rounded, strict=False)) if a != b), len(exact))
        shares.append(same / len(exact))
    return {
        "demo_fp8_first_difference": statistics.mean(shares),
        "demo_fp8_acceptance_ratio": acceptance["fp8"] / acceptance["bfloat16"],
    }, {"prompts": count, "max_tokens": max_tokens, "acceptance": acceptance}

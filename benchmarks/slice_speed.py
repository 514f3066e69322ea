"""CPU speed: speculation against plain decoding, plain decoding against transformers, batch 8 against batch 1."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.slice_greedy import load_reference_target, transformers_greedy
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.datasets import load_prompts


def speed_figures(
    engines: Path, prompts_file: Path, *, count: int, max_tokens: int, repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ratios of medians of tokens/s; the settings are interleaved, so that drift of the machine cancels."""
    messages = load_prompts(prompts_file, count)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    model = load_reference_target()
    plainly = {"prefix_cache": False}  # repeats must cost what the first one did
    with LLM(engines, speculation="on", **plainly) as speculative, LLM(engines, speculation="off", **plainly) as plain:
        prompts = [plain.encode(message) for message in messages]

        def singly(llm: LLM) -> int:
            return sum(len(llm.generate([ids], params)[0].token_ids) for ids in prompts)

        def by_eight(llm: LLM) -> int:
            groups = [prompts[first : first + 8] for first in range(0, count, 8)]
            return sum(len(output.token_ids) for group in groups for output in llm.generate(group, params))

        settings: dict[str, Callable[[], int]] = {
            "speculation_batch_1": lambda: singly(speculative),
            "plain_batch_1": lambda: singly(plain),
            "speculation_batch_8": lambda: by_eight(speculative),
            "plain_batch_8": lambda: by_eight(plain),
            "transformers_batch_1": lambda: sum(len(transformers_greedy(model, ids, max_tokens)) for ids in prompts),
        }
        for llm in (speculative, plain):
            llm.generate([prompts[0]], params)
        transformers_greedy(model, prompts[0], 8)
        rates: dict[str, list[float]] = {name: [] for name in settings}
        for _ in range(repeats):
            for name, run in settings.items():
                begun = time.perf_counter()
                tokens = run()
                rates[name].append(tokens / (time.perf_counter() - begun))
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:24s} {median[name]:8.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})", flush=True)
    figures = {
        "cpu_speculation_over_plain": median["speculation_batch_1"] / median["plain_batch_1"],
        "cpu_plain_over_transformers": median["plain_batch_1"] / median["transformers_batch_1"],
        "batch8_over_batch1": median["speculation_batch_8"] / median["speculation_batch_1"],
    }
    return figures, {"prompts": count, "max_tokens": max_tokens, "tokens_per_second": rates}

"""Greedy output against transformers' own, token for token, with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.datasets import load_prompts
from trtllm_dflash.checkpoint.demo import demo_target


def load_reference_target() -> PreTrainedModel:
    """The demo target in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(demo_target(), dtype=torch.float32).eval()


@torch.inference_mode()
def transformers_greedy(model: PreTrainedModel, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Plain greedy decoding of one prompt; returns new tokens, EOS included."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, eos_token_id=2
    )
    return tuple(output[0, len(ids) :].tolist())


def greedy_figures(
    engines: Path, prompts_file: Path, *, count: int, max_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``greedy_identical``: share of prompts whose tokens equal transformers' in every one of the four settings."""
    messages = load_prompts(prompts_file, count)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    equal: dict[str, list[bool]] = {}
    expected: list[tuple[int, ...]] = []
    for speculation in ("on", "off"):
        with LLM(engines, speculation=speculation) as llm:  # type: ignore[arg-type]
            if not expected:
                model = load_reference_target()
                expected = [transformers_greedy(model, llm.encode(prompt), max_tokens) for prompt in messages]
                del model
            singly = [llm.generate([prompt], params)[0].token_ids for prompt in messages]
            eights = [
                output.token_ids
                for first in range(0, count, 8)
                for output in llm.generate(messages[first : first + 8], params)
            ]
        equal[f"speculation_{speculation}_batch_1"] = [a == b for a, b in zip(singly, expected, strict=True)]
        equal[f"speculation_{speculation}_batch_8"] = [a == b for a, b in zip(eights, expected, strict=True)]
    shares = {key: sum(values) / count for key, values in equal.items()}
    return {"greedy_identical": min(shares.values())}, {"prompts": count, "max_tokens": max_tokens, "shares": shares}

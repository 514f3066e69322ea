"""Prefix reuse and structured output on the demo pair."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from trtllm_dflash import LLM, SamplingParams

PREFIX_TOKENS = 600
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "is_member": {"type": "boolean"},
        },
        "required": ["name", "age", "is_member"],
    },
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "weather": {"enum": ["sun", "rain", "snow", "wind"]},
            "degrees": {"type": "number"},
        },
        "required": ["city", "weather", "degrees"],
    },
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 60},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
            "author": {
                "type": "object",
                "properties": {
                    "first": {"type": "string", "maxLength": 20},
                    "last": {"type": "string", "maxLength": 20},
                },
                "required": ["first", "last"],
            },
        },
        "required": ["title", "tags", "author"],
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 8},
)
_TOPICS = ("a cat", "a ship", "Paris", "a doctor", "the sea", "a recipe", "a film", "a robot", "the moon", "a school")


def prefix_figures(engines: Path, *, requests: int, max_tokens: int = 32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Requests that share a prefix of 600 tokens, with and without the prefix cache, all sent at once.

    Returns:
        (figures, details). ``prefix_prefill_saved``: share of the prompt tokens that were not computed;
        ``prefix_acceptance_rel_diff``: of the pooled acceptance length; ``prefix_texts_equal``: share of equal outputs.
    """
    runs = {}
    for name, prefix_cache in (("with", True), ("without", False)):
        with LLM(engines, prefix_cache=prefix_cache) as llm:
            prompts = _sharing_prompts(llm, requests)
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
            counters = llm.stats().counters
        cycles = sum(output.metrics.cycles for output in outputs)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        runs[name] = {
            "prompt_tokens": sum(map(len, prompts)),
            "prefill_tokens": counters["prefill_tokens"],
            "acceptance_length": 1 + accepted / cycles,
            "median_first_token_s": round(median(o.metrics.time_to_first_token_s for o in outputs), 3),
            "elapsed_s": round(max(o.metrics.elapsed_s for o in outputs), 1),
            "texts": [output.text for output in outputs],
        }
    cached, plain = runs["with"], runs["without"]
    equal = sum(a == b for a, b in zip(cached.pop("texts"), plain.pop("texts"), strict=True)) / requests
    figures = {
        "prefix_prefill_saved": round(1 - cached["prefill_tokens"] / plain["prefill_tokens"], 4),
        "prefix_acceptance_rel_diff": round(abs(cached["acceptance_length"] / plain["acceptance_length"] - 1), 4),
        "prefix_texts_equal": equal,
    }
    return figures, {"requests": requests, "max_tokens": max_tokens, **runs}


def json_figures(engines: Path, *, prompts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``json_schema_parsed``: prompts at temperature 1 whose output is JSON with the schema's keys."""
    texts = []
    each = []
    for number in range(prompts):
        schema = _SCHEMAS[number % len(_SCHEMAS)]
        topic = _TOPICS[number // len(_SCHEMAS) % len(_TOPICS)]
        texts.append([{"role": "user", "content": f"Write a JSON document about {topic}."}])
        each.append(
            SamplingParams(temperature=1.0, max_tokens=400, seed=number, structured_output={"json_schema": schema})  # type: ignore[arg-type]
        )
    with LLM(engines) as llm:
        outputs = llm.generate(texts, each)
    parsed = sum(_fits(output.text, _SCHEMAS[n % len(_SCHEMAS)]) for n, output in enumerate(outputs))
    cycles = sum(output.metrics.cycles for output in outputs)
    details = {
        "prompts": prompts,
        "finish_reasons": {reason: sum(o.finish_reason == reason for o in outputs) for reason in ("stop", "length")},
        "acceptance_length": 1 + sum(output.metrics.accepted_tokens for output in outputs) / cycles,
        "longest_output_tokens": max(len(output.token_ids) for output in outputs),
        "samples": [output.text for output in outputs[:4]],
    }
    return {"json_schema_parsed": parsed}, details


def _sharing_prompts(llm: LLM, count: int) -> list[list[int]]:
    rules = " ".join(
        f"Rule {n}: when a question is about the number {n}, say so first, then answer in {n % 5 + 1} short sentences."
        for n in range(1, 60)
    )
    prefix = list(llm.encode(rules))[:PREFIX_TOKENS]
    assert len(prefix) == PREFIX_TOKENS
    return [prefix + list(llm.encode(f" What is {n} plus {n + 3}?")) for n in range(count)]


def _fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    if schema["type"] == "array":
        return isinstance(document, list) and schema["minItems"] <= len(document) <= schema["maxItems"]
    return isinstance(document, dict) and list(document) == schema["required"]

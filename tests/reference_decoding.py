"""Decoding without speculation, caches or batches: transformers forwards and float64 sampling, as slow as it is plain.

This is the independent definition that the runtime's output is held to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trtllm_dflash.config.sampling import SamplingParams

Ids = Sequence[int]


def next_logits(model: PreTrainedModel, sequences: Sequence[Ids]) -> Tensor:
    """Last-position logits ``[N, V]`` float64 of sequences of equal length."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(sequences), 512):
            ids = torch.tensor(sequences[start : start + 512])
            rows.append(model(ids, logits_to_keep=1).logits[:, -1].double())
    return torch.cat(rows)


def processed(
    logits: Tensor,
    prompt: Ids,
    output: Ids,
    params: SamplingParams,
    *,
    stop_ids: Ids = (),
    bad_words: Sequence[Ids] = (),
) -> list[float]:
    """Bad words, min_tokens, bias, then penalties, for one row ``[V]``."""
    scores = logits.tolist()
    sequence = [*prompt, *output]
    for word in bad_words:
        prefix = list(word[:-1])
        if not prefix or sequence[-len(prefix) :] == prefix:
            scores[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            scores[token] = -math.inf
    for token, bias in params.logit_bias.items():
        scores[token] += -math.inf if bias == -100 else bias
    for token in set(sequence):
        score = scores[token]
        penalty = params.repetition_penalty
        scores[token] = score / penalty if score > 0 else score * penalty
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def probabilities(scores: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p of one row, renormalised after each."""
    best = max(scores)
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    kept: dict[int, float] = {}
    total, mass = sum(weights[token] for token in order), 0.0
    for token in order:
        if mass < params.top_p:
            kept[token] = weights[token] / total
        mass += weights[token] / total
    floor = params.min_p * max(kept.values())
    kept = {token: p for token, p in kept.items() if p >= floor}
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(weights))]


def greedy(
    model: PreTrainedModel,
    prompt: Ids,
    params: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: Ids = (),
    bad_words: Sequence[Ids] = (),
) -> list[int]:
    """Output tokens of greedy decoding under ``params``, the stop id included."""
    output: list[int] = []
    while len(output) < max_tokens:
        logits = next_logits(model, [[*prompt, *output]])[0]
        scores = processed(logits, prompt, output, params, stop_ids=stop_ids, bad_words=bad_words)
        output.append(scores.index(max(scores)))
        if output[-1] in stop_ids:
            break
    return output


def output_distribution(
    model: PreTrainedModel, prompt: Ids, params: SamplingParams, length: int, *, prune: float = 1e-5
) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens (no stops); tokens less likely than ``prune`` are left out."""
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(outputs)
        rows = next_logits(model, [[*prompt, *prefix] for prefix in prefixes])
        longer: dict[tuple[int, ...], float] = {}
        for prefix, row in zip(prefixes, rows, strict=True):
            for token, p in enumerate(probabilities(processed(row, prompt, prefix, params), params)):
                if p > prune:
                    longer[(*prefix, token)] = p * outputs[prefix]
        outputs = longer
    return outputs


def token_logprobs(model: PreTrainedModel, prompt: Ids, output: Ids) -> Tensor:
    """Log-probabilities ``[len(output), V]`` float64 of the target at every output position."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0].double()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)

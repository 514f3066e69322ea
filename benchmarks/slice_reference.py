"""Acceptance lengths and network outputs against the public reference, ``dflash`` 0.1.0, in float32."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import dflash.model as reference
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.slice_greedy import load_reference_target
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.datasets import load_prompts
from trtllm_dflash.checkpoint.demo import demo_drafter
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.session import DraftInputs, TargetInputs
from trtllm_dflash.runtime.prompting import PromptEncoder

# The reference's clock synchronises CUDA, which a CPU has not.
reference._cuda_time = time.perf_counter


def acceptance_figures(
    engines: dict[int, Path], prompts_file: Path, *, count: int, max_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``reference_acceptance_max_diff``: largest difference of a prompt's mean acceptance length, both drafters."""
    target = load_reference_target()
    messages = load_prompts(prompts_file, count)
    acceptance: dict[str, Any] = {}
    worst = 0.0
    for version, path in engines.items():
        drafter = load_reference_drafter(version, path)
        ours, theirs, same = [], [], 0
        with LLM(path, speculation="on") as llm:
            for prompt in messages:
                ids = llm.encode(prompt)
                output = llm.generate([ids], SamplingParams(max_tokens=max_tokens, temperature=0.0))[0]
                stats = reference.dflash_generate(
                    drafter, target, torch.tensor([ids]), max_tokens, [2], return_stats=True
                )
                same += tuple(stats.output_ids[0, len(ids) :].tolist()) == output.token_ids
                ours.append(output.metrics.acceptance_length or 0.0)
                theirs.append(sum(stats.acceptance_lengths) / max(1, len(stats.acceptance_lengths)))
        worst = max([worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True))])
        acceptance[f"v{version}"] = {
            "ours_mean": sum(ours) / count,
            "reference_mean": sum(theirs) / count,
            "texts_equal": same / count,
        }
    return {"reference_acceptance_max_diff": worst}, {
        "prompts": count,
        "max_tokens": max_tokens,
        "acceptance": acceptance,
    }


def score_figures(engines: dict[int, Path], prompts_file: Path, *, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``reference_scores_max_rel_err``: network outputs of the first block after each of ``count`` prompts."""
    target = load_reference_target()
    messages = load_prompts(prompts_file, count)
    errors: dict[str, float] = {}
    for version, path in engines.items():
        drafter = load_reference_drafter(version, path)
        encoder = PromptEncoder(path / "tokenizer", target.config.vocab_size)
        for prompt in messages:
            for key, value in output_errors(path, drafter, target, encoder.encode(prompt)).items():
                name = f"v{version}_{key}"
                errors[name] = max(value, errors.get(name, 0.0))
    return {"reference_scores_max_rel_err": max(errors.values())}, {"prompts": count, "relative_errors": errors}


def load_reference_drafter(version: int, engines: Path) -> PreTrainedModel:
    """The reference's model of the drafter that ``engines`` was converted from."""
    name = json.loads((engines / "config.json").read_text())["source"]["drafter"]["name"]
    folder = demo_drafter() if name == "demo" else Path(name)
    model_class = reference.DFlash2DraftModel if version == 2 else reference.DFlashDraftModel
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def output_errors(
    engines: Path, drafter: PreTrainedModel, target: PreTrainedModel, ids: tuple[int, ...]
) -> dict[str, float]:
    """Largest difference over largest magnitude of features, target logits and candidate scores.

    Scores are compared as log-softmax over the candidates along the walk's own path (the q rows at temperature 1).
    """
    session = load_session(engines, device="cpu")
    config = session.drafter_config
    if config is None:
        raise ValueError(f"{engines} has no drafter")
    page_tokens = session.limits.page_tokens
    length, block = len(ids), config.block_size
    pages = torch.arange((length + block) // page_tokens + 1)
    session.allocate_caches(len(pages))
    tokens, positions = torch.tensor(ids), torch.arange(length)
    ours = session.target(
        TargetInputs(
            tokens, positions, positions, pages[None], torch.tensor([0]), torch.tensor([0, length]), None, length
        )
    )
    session.inject(ours.features, positions, positions)
    hidden_states = target(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
    anchor = ours.logits[-1].argmax().view(1)
    draft = session.draft(
        DraftInputs(
            anchor,
            torch.tensor([length]),
            torch.tensor([block]),
            pages[None],
            torch.ones(1),
            torch.full((1, block - 1), 0.5),
        ),
        block,
    )
    noise = torch.cat((anchor, torch.full((block - 1,), config.mask_token_id)))
    hidden = drafter(
        position_ids=torch.arange(length + block)[None],
        noise_embedding=target.get_input_embeddings()(noise)[None],
        target_hidden=features,
        past_key_values=DynamicCache(config=drafter.config),
        use_cache=True,
    )[:, 1:]
    logits = drafter.compute_logits(hidden, target.lm_head)
    session.close()
    errors = {
        "features": _relative(ours.features, features[0]),
        "target_logits": _relative(ours.logits, target(tokens[None]).logits[0]),
    }
    theirs = logits.topk(draft.candidates.shape[-1]).indices.sort(-1).values
    errors["candidates_differing"] = float((theirs != draft.candidates.sort(-1).values).float().mean())
    scores = logits.gather(-1, draft.candidates)
    if config.selector is not None:
        selector = drafter.candidate_selector
        path = torch.cat((anchor[None], draft.draft_tokens), dim=1)[:, :-1]
        scores = scores + torch.einsum(
            "bnr,bnkr->bnk",
            selector.predecessor_codebook(path) * selector.hidden_projection(hidden),
            selector.successor_codebook(draft.candidates),
        )
    errors["scores"] = _relative(draft.q_rows.log(), torch.log_softmax(scores, dim=-1))
    return errors


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())

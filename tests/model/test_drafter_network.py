"""The drafter networks against the public reference (``dflash`` 0.1.0): states, candidates, scores and walk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_pair import (
    ACTIVE,
    MASK,
    PAIRS,
    VOCAB_SIZE,
    DrafterRecipe,
    TargetRecipe,
    drafter_config,
    drafter_tensors,
    random_target,
    write_drafter,
    write_target,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, EngineSession

CONTEXT = 37


@pytest.fixture(scope="module")
def reference() -> Any:
    """The reference's module."""
    return pytest.importorskip("dflash.model", reason="the reference is not installed (pip install dflash --no-deps)")


def _draft(
    session: EngineSession, features: Tensor, anchor: int, block_size: int, temperature: float = 0.0, draw: float = 0.5
) -> DraftOutputs:
    """Inject ``features`` in two pieces into pages that are out of order, then draft one block."""
    session.allocate_caches(4)
    pages, page_tokens = torch.tensor([[1, 3, 0]]), session.limits.page_tokens
    positions = torch.arange(features.shape[0])
    slots = pages[0, positions // page_tokens] * page_tokens + positions % page_tokens
    for part in (slice(0, 10), slice(10, None)):
        session.inject(features[part], positions[part], slots[part])
    return session.draft(
        DraftInputs(
            anchors=torch.tensor([anchor]),
            context_lengths=torch.tensor([features.shape[0]]),
            block_lengths=torch.tensor([block_size]),
            page_table=pages,
            temperatures=torch.tensor([temperature]),
            uniforms=torch.full((1, block_size - 1), draw),
        ),
        block_size,
    )


def _reference_hidden(
    drafter: Any, model: PreTrainedModel, features: Tensor, anchor: int, block_size: int, scale: float
) -> Tensor:
    """The reference's final states of rows 1 .. S-1, ``[1, S-1, H]``."""
    block = torch.tensor([[anchor] + [MASK] * (block_size - 1)])
    with torch.inference_mode():
        return drafter(
            position_ids=torch.arange(features.shape[0] + block_size)[None],
            noise_embedding=model.get_input_embeddings()(block) * scale,
            target_hidden=features[None],
            past_key_values=DynamicCache(config=drafter.config),
            use_cache=True,
        )[:, 1:]


def _features(model: PreTrainedModel, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(CONTEXT, count * model.config.hidden_size, generator=generator)


def _reference_drafter(reference: Any, directory: Path, version: int) -> Any:
    kind = reference.DFlash2DraftModel if version == 2 else reference.DFlashDraftModel
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


def _check_against_reference(
    reference: Any, session: EngineSession, model: PreTrainedModel, directory: Path, block_size: int
) -> None:
    config = session.drafter_config
    assert config is not None
    drafter = _reference_drafter(reference, directory, config.version)
    features = _features(model, len(config.target_layer_ids))
    for anchor in (ACTIVE[2], ACTIVE[9], 200):
        hidden = _reference_hidden(drafter, model, features, anchor, block_size, config.input_embedding_scale)
        with torch.inference_mode():
            logits = drafter.compute_logits(hidden, model.lm_head)
        found = _draft(session, features, anchor, block_size)
        if config.version == 1:
            assert found.draft_tokens.tolist() == logits.argmax(-1).tolist()
            _check_plain_q_rows(session, features, anchor, logits)
            continue
        with torch.inference_mode():
            tokens, candidates, _ = drafter.propose(hidden, torch.tensor([anchor]), model.lm_head, 0.0)
        assert found.draft_tokens.tolist() == tokens.tolist()
        # The reference leaves its candidates unordered.
        assert found.candidates.sort(-1).values.tolist() == candidates.sort(-1).values.tolist()
        _check_q_rows(reference, drafter, session, model, features, anchor, hidden)


def _check_plain_q_rows(session: EngineSession, features: Tensor, anchor: int, logits: Tensor) -> None:
    """DFlash 1 draws each position from its best candidates: q is their softmax at the request's temperature."""
    found = _draft(session, features, anchor, logits.shape[1] + 1, temperature=0.8, draw=0.37)
    for position in range(logits.shape[1]):
        candidates, row = found.candidates[0, position], found.q_rows[0, position]
        best = torch.topk(logits[0, position], len(candidates))
        assert candidates.tolist() == best.indices.tolist()
        torch.testing.assert_close(row, torch.softmax(best.values / 0.8, dim=-1), atol=2e-5, rtol=0)


def _check_q_rows(
    reference: Any,
    drafter: Any,
    session: EngineSession,
    model: PreTrainedModel,
    features: Tensor,
    anchor: int,
    hidden: Tensor,
) -> None:
    """Realised proposal rows, hence the scores: the reference's own, along the path that our walk took."""
    block_size = hidden.shape[1] + 1
    found = _draft(session, features, anchor, block_size, temperature=0.8, draw=0.37)
    original = reference._sample_probs
    with torch.inference_mode():
        logits = drafter.compute_logits(hidden, model.lm_head)
        candidates = torch.topk(logits, drafter.candidate_selector.top_k, dim=-1, sorted=False).indices
        # The reference's columns of our tokens, in place of its own draws.
        columns = iter((candidates[0] == found.draft_tokens[0, :, None]).nonzero()[:, 1:])
        reference._sample_probs = lambda probabilities: next(columns)
        try:
            _, ordered, q_rows = drafter.propose(hidden, torch.tensor([anchor]), model.lm_head, 0.8)
        finally:
            reference._sample_probs = original
    ours = torch.zeros(block_size - 1, VOCAB_SIZE).scatter_(-1, found.candidates[0], found.q_rows[0])
    theirs = torch.zeros(block_size - 1, VOCAB_SIZE).scatter_(-1, ordered[0], q_rows[0])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert float(ours.max(-1).values.min()) < 0.999, "a row of certainty would prove nothing about its scores"


@pytest.mark.parametrize("name", PAIRS)
def test_equals_reference(reference: Any, tiny_pairs: Callable, tiny_engines: Callable, name: str) -> None:
    """Windows, causality, unsorted ids, multiplier, soft cap, embedding scale and biases, as the pairs have them."""
    session, pair = load_session(tiny_engines(name), device="cpu"), tiny_pairs(name)
    _check_against_reference(reference, session, pair.model, pair.drafter, session.limits.block_size)


@pytest.mark.parametrize("block_size", [2, 3])
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_smaller_block_equals_reference(
    reference: Any, tiny_pairs: Callable, tiny_engines: Callable, name: str, block_size: int
) -> None:
    """The convolution and the visibility end with the block that is run, not with the one of the checkpoint."""
    session, pair = load_session(tiny_engines(name, block_size=block_size), device="cpu"), tiny_pairs(name)
    assert session.limits.block_size == block_size
    _check_against_reference(reference, session, pair.model, pair.drafter, block_size)


@pytest.fixture(scope="module")
def build_drafter(tmp_path_factory: pytest.TempPathFactory, tiny_pairs: Callable) -> Callable:
    """Convert and build a changed drafter recipe for the qwen3-v2 target."""

    done: dict[str, tuple[EngineSession, Path]] = {}

    def built(recipe: DrafterRecipe) -> tuple[EngineSession, Path]:
        if repr(recipe) not in done:
            done[repr(recipe)] = make(recipe)
        return done[repr(recipe)]

    def make(recipe: DrafterRecipe) -> tuple[EngineSession, Path]:
        root, pair = tmp_path_factory.mktemp("drafter"), tiny_pairs("qwen3-v2")
        write_drafter(root / "drafter", recipe, pair.model)
        convert(str(pair.target), str(root / "drafter"), root / "checkpoint")
        build(root / "checkpoint", root / "engines", max_seq_len=256)
        return load_session(root / "engines", device="cpu"), root / "drafter"

    return built


SLIDING = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CAUSALITY: dict[str, dict[str, Any]] = {
    "absent": SLIDING,
    "true": SLIDING | {"is_causal": True},
    "false": SLIDING | {"is_causal": False},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", CAUSALITY)
def test_causality_table(
    reference: Any, tiny_pairs: Callable, build_drafter: Callable, case: str, version: int
) -> None:
    """A sliding and a full layer. ``is_causal`` absent means: the first causal, the second not, in both versions."""
    recipe = DrafterRecipe(version, block_size=5, top_level=CAUSALITY[case])  # type: ignore[arg-type]
    session, directory = build_drafter(recipe)
    _check_against_reference(reference, session, tiny_pairs("qwen3-v2").model, directory, 5)


CHANGES: dict[str, dict[str, Any]] = {
    "multiplier": {"output_multiplier": 0.2},
    "softcap": {"final_logit_softcapping": 3.0},
    "multiplier and softcap": {"output_multiplier": 0.3, "final_logit_softcapping": 5.0},
    "embedding scale": {"input_embedding_scale": 24.0},
}


@pytest.mark.parametrize("case", CHANGES)
def test_scaling_fields(reference: Any, tiny_pairs: Callable, build_drafter: Callable, case: str) -> None:
    """Each matches the reference and differs from a drafter without it."""
    plain, _ = build_drafter(DrafterRecipe(2, block_size=5, candidates=12))
    session, directory = build_drafter(DrafterRecipe(2, block_size=5, candidates=12, extra=CHANGES[case]))
    model = tiny_pairs("qwen3-v2").model
    _check_against_reference(reference, session, model, directory, 5)
    features = _features(model, 3)
    rows = [_draft(one, features, ACTIVE[2], 5, temperature=1.0).q_rows for one in (plain, session)]
    assert not torch.allclose(rows[0], rows[1], atol=1e-3)


def test_reduced_vocabulary_uses_its_own_head(reference: Any, tmp_path: Path) -> None:
    """Speculators: 32 drafted ids with a head of their own, mapped to the target's by offsets; layer ids shifted."""
    recipe = TargetRecipe("llama", seed=3)
    write_target(tmp_path / "target", recipe)
    model = random_target(recipe)
    drafter = DrafterRecipe(1, block_size=4, target_layer_ids=(0, 2))
    write_drafter(tmp_path / "z-lab", drafter, model)
    generator = torch.Generator().manual_seed(4)
    kept = torch.randperm(VOCAB_SIZE, generator=generator)[:32].sort().values
    head = torch.randn(32, model.config.hidden_size, generator=generator)
    offsets = kept - torch.arange(32)
    speculators = _speculators_directory(tmp_path / "speculators", drafter, model)
    tensors = drafter_tensors(drafter, model)
    seen = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    seen[kept] = True
    save_file(tensors | {"lm_head.weight": head, "d2t": offsets, "t2d": seen}, speculators / "model.safetensors")
    sessions = {}
    for name in ("z-lab", "speculators"):
        convert(str(tmp_path / "target"), str(tmp_path / name), tmp_path / f"{name} checkpoint")
        build(tmp_path / f"{name} checkpoint", tmp_path / f"{name} engines", max_seq_len=256)
        sessions[name] = load_session(tmp_path / f"{name} engines", device="cpu")
    features = _features(model, 2)
    hidden = _reference_hidden(
        _reference_drafter(reference, tmp_path / "z-lab", 1), model, features, ACTIVE[3], 4, scale=1.0
    )
    found = _draft(sessions["speculators"], features, ACTIVE[3], 4)
    logits = hidden @ head.T
    assert found.draft_tokens.tolist() == kept[logits.argmax(-1)].tolist()
    # Acceptance looks q up by the target's ids, so the candidates must be those too.
    sampled = _draft(sessions["speculators"], features, ACTIVE[3], 4, temperature=0.8, draw=0.37)
    best = torch.topk(logits, sampled.candidates.shape[-1])
    assert sampled.candidates.tolist() == kept[best.indices].tolist()
    torch.testing.assert_close(sampled.q_rows, torch.softmax(best.values / 0.8, dim=-1), atol=2e-5, rtol=0)
    drawn = (sampled.q_rows.cumsum(-1) <= 0.37).sum(-1, keepdim=True)
    assert sampled.draft_tokens.tolist() == sampled.candidates.gather(-1, drawn).squeeze(-1).tolist()
    assert found.draft_tokens.tolist() != _draft(sessions["z-lab"], features, ACTIVE[3], 4).draft_tokens.tolist()


def _speculators_directory(directory: Path, recipe: DrafterRecipe, model: PreTrainedModel) -> Path:
    z_lab = drafter_config(recipe, model)
    directory.mkdir()
    layers = {
        key: value
        for key, value in z_lab.items()
        if key not in ("architectures", "dflash_config", "num_target_layers", "block_size")
    }
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "speculators_version": "0.3.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": 32,
        "block_size": recipe.block_size,
        "target_hidden_size": model.config.hidden_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in recipe.target_layer_ids],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory

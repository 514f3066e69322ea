"""The target network against transformers: logits, captured features, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import MAX_POSITIONS, TargetRecipe, random_target, write_target
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.session import EngineSession, TargetInputs, TargetOutputs
from trtllm_dflash.model.rope import cos_sin_table, inverse_frequencies

TOKENS = 45
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with everything": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.7,
    },
}


def run_target(session: EngineSession, ids: Sequence[int]) -> TargetOutputs:
    """One pass over a whole sequence, in pages that are out of order."""
    session.allocate_caches(4)
    pages = torch.tensor([[2, 0, 3, 1]])
    positions = torch.arange(len(ids))
    page_tokens = session.limits.page_tokens
    return session.target(
        TargetInputs(
            input_ids=torch.tensor(ids),
            positions=positions,
            slots=pages[0, positions // page_tokens] * page_tokens + positions % page_tokens,
            page_table=pages,
            context_lengths=torch.tensor([0]),
            query_starts=torch.tensor([0, len(ids)]),
            logit_rows=None,
            max_query=len(ids),
        )
    )


def layer_outputs(model: PreTrainedModel, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, V]`` and the output ``[T, H]`` of every decoder layer, by hooks.

    transformers' ``hidden_states`` has the last layer only after the final norm.
    """
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _module, _args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in model.model.layers
    ]
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)])).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, [output.reshape(len(ids), -1) for output in outputs]


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1", "qwen3-v2", "llama-v1", "llama-bias"])
def test_logits_and_features(tiny_pairs: Callable, tiny_engines: Callable, name: str) -> None:
    """Feature column i is the output of decoder layer id i, in the configuration's order, the last one un-normed."""
    session, model = load_session(tiny_engines(name), device="cpu"), tiny_pairs(name).model
    ids = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    found = run_target(session, ids)
    logits, layers = layer_outputs(model, ids)
    assert session.drafter_config is not None
    captured = session.drafter_config.target_layer_ids
    assert model.config.num_hidden_layers - 1 in captured
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.features, torch.cat([layers[i] for i in captured], -1), atol=1e-4, rtol=1e-4)


def test_inner_features_are_transformers_hidden_states(tiny_pairs: Callable, tiny_engines: Callable) -> None:
    """Layer id i is ``hidden_states[i + 1]``, as every DFlash checkpoint counts."""
    session, model = load_session(tiny_engines("llama-v2"), device="cpu"), tiny_pairs("llama-v2").model
    ids = list(range(40, 60))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = run_target(session, ids).features.split(model.config.hidden_size, dim=-1)
    for column, layer in enumerate((2, 0)):
        torch.testing.assert_close(features[column], states[layer + 1][0], atol=1e-4, rtol=1e-4)


def test_a_layer_is_not_captured_twice(tiny_engines: Callable) -> None:
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    assert session.drafter_config is not None
    session.drafter_config = replace(session.drafter_config, target_layer_ids=(2, 0, 2))
    with pytest.raises(ValueError, match=r"capture_layers are \[2, 0, 2\], expected each layer once"):
        run_target(session, [1, 2, 3])


@pytest.mark.parametrize("kind", ROPES)
def test_rope_in_a_whole_target(tmp_path: Path, kind: str) -> None:
    recipe = TargetRecipe("llama", layers=2, rope=ROPES[kind])
    write_target(tmp_path / "target", recipe)
    convert(str(tmp_path / "target"), None, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engines", max_seq_len=300)
    session = load_session(tmp_path / "engines", device="cpu")
    ids = [5 + n % 250 for n in range(100)]
    logits, _ = layer_outputs(random_target(recipe), ids)
    torch.testing.assert_close(run_target(session, ids).logits, logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "default"])
def test_inverse_frequencies_equal_transformers(kind: str) -> None:
    values = ROPES[kind]
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=values,
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, torch.device("cpu"))
    names = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}
    found, found_factor = inverse_frequencies(
        RopeConfig(rotary_dim=16, **{names.get(key, key): value for key, value in values.items()})
    )
    torch.testing.assert_close(found, wanted, atol=0, rtol=1e-6)
    assert found_factor == pytest.approx(factor)


def test_cos_sin_table() -> None:
    table = cos_sin_table(RopeConfig(10000.0, 4), 50).double()
    for position in (0, 1, 49):
        for pair, frequency in enumerate((1.0, 0.01)):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            # float32 angles up to 49 are exact to 4e-6.
            assert float(table[position, pair]) == pytest.approx(float(angle.cos()), abs=1e-5)
            assert float(table[position, 2 + pair]) == pytest.approx(float(angle.sin()), abs=1e-5)

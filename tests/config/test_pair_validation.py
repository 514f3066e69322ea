"""What a target and a drafter must agree on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.config.families import parse_target_config
from trtllm_dflash.config.pair_validation import validate_pair
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import ConfigError

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
}


@pytest.fixture
def target(write: Any) -> TargetConfig:
    return parse_target_config(write(TARGET, "target"))


@pytest.fixture
def drafter(write: Any, zlab_v2: dict[str, Any]) -> DrafterConfig:
    return parse_drafter_config(write(zlab_v2, "drafter"))


def test_demo_pair_fits(write: Any) -> None:
    directory = Path(__file__).parents[2] / "examples" / "smollm2" / "drafter"
    fields = {"vocab_size": 49152, "hidden_size": 576, "num_attention_heads": 9, "num_hidden_layers": 30}
    assert validate_pair(parse_target_config(write(TARGET | fields)), parse_drafter_config(directory)) == ()


def test_fitting_pair_needs_no_notes(target: TargetConfig, drafter: DrafterConfig) -> None:
    assert validate_pair(target, drafter) == ()


@pytest.mark.parametrize(("drafter_vocab", "words"), [(1064, "are cut"), (936, "by the head alone")])
def test_vocabularies_that_differ_are_noted(
    target: TargetConfig, drafter: DrafterConfig, drafter_vocab: int, words: str
) -> None:
    (note,) = validate_pair(target, replace(drafter, vocab_size=drafter_vocab))
    assert words in note
    assert f"drafter vocabulary {drafter_vocab}, target vocabulary 1000" in note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, "hidden_size of the drafter is 32, of the target 64"),
        ({"target_hidden_size": 128}, "target features of hidden size 128, the target has 64"),
        ({"num_target_layers": 13}, "trained for a target of 13 layers .*, this target has 12"),
        ({"num_target_layers": None, "target_layer_ids": (1, 12)}, r"layer ids \[12\] are outside \[0, 11\]"),
        ({"vocab_size": 2000, "mask_token_id": 1500}, r"mask_token_id 1500 is outside \[0, 999\]"),
    ],
)
def test_pairs_that_do_not_fit(
    target: TargetConfig, drafter: DrafterConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validate_pair(target, replace(drafter, **changes))
    assert caught.value.hint is not None


def test_last_layer_may_be_captured(target: TargetConfig, drafter: DrafterConfig) -> None:
    assert validate_pair(target, replace(drafter, target_layer_ids=(0, 11))) == ()

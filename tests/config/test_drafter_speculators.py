"""The Speculators drafter format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.errors import ConfigError


def test_version_1_with_reduced_vocabulary(write: Any, speculators_v1: dict[str, Any]) -> None:
    """Ids count the embedding output as 0, so they shift by one; 32 of 1000 tokens have a head row."""
    config = parse_drafter_config(write(speculators_v1))
    assert (config.version, config.source_format) == (1, "speculators")
    assert config.target_layer_ids == (1, 5, 8)
    assert (config.vocab_size, config.draft_vocab_size) == (1000, 32)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (8, 7, None)
    assert config.conv is None
    assert config.selector is None


@pytest.mark.parametrize(("model_type", "head_dim"), [("qwen3", 128), ("llama", 16)])
def test_sizes_that_are_left_out(write: Any, speculators_v1: dict[str, Any], model_type: str, head_dim: int) -> None:
    """The head size is the default of the layers' own kind; the block size is that of Speculators."""
    layers = speculators_v1["transformer_layer_config"] | {"model_type": model_type}
    del layers["head_dim"]
    config = parse_drafter_config(
        write(speculators_v1, transformer_layer_config=layers, block_size=None, speculators_config=None)
    )
    assert (config.head_dim, config.block_size) == (head_dim, 8)


@pytest.mark.parametrize(("stored", "expected"), [(None, 64), (128, 128)])
def test_size_of_the_targets_features(
    write: Any, speculators_v1: dict[str, Any], stored: int | None, expected: int
) -> None:
    """Trainers write null where it is the drafter's own."""
    directory = write(speculators_v1)
    (directory / "config.json").write_text(json.dumps(speculators_v1 | {"target_hidden_size": stored}))
    assert parse_drafter_config(directory).target_hidden_size == expected


def test_version_2(write: Any, speculators_v2: dict[str, Any]) -> None:
    config = parse_drafter_config(write(speculators_v2))
    assert config.version == 2
    assert config.draft_vocab_size is None
    assert config.selector is not None
    assert (config.selector.rank, config.selector.top_k) == (8, 4)


def test_scaling_fields_are_kept(write: Any, speculators_v2: dict[str, Any]) -> None:
    """Without them the drafter runs and proposes worse; only the acceptance length would tell."""
    fields = {"output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 24.0}
    config = parse_drafter_config(write(speculators_v2, **fields))
    assert (config.output_multiplier, config.final_logit_softcapping, config.input_embedding_scale) == (0.2, 20.0, 24.0)


def test_unsorted_layer_ids_keep_their_order(write: Any, speculators_v1: dict[str, Any]) -> None:
    """The columns of the features follow the file."""
    config = parse_drafter_config(write(speculators_v1, aux_hidden_state_layer_ids=[9, 2, 6]))
    assert config.target_layer_ids == (8, 1, 5)


def test_version_2_with_reduced_vocabulary(write: Any, speculators_v2: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size': found 32, expected the whole vocabulary \(1000\)"):
        parse_drafter_config(write(speculators_v2, draft_vocab_size=32))


@pytest.mark.parametrize(("version", "non_causal", "causal"), [
    (1, None, True), (1, True, False), (1, False, True), (2, None, False), (2, True, False), (2, False, True),
])  # fmt: skip
def test_causality(
    write: Any,
    speculators_v1: dict[str, Any],
    speculators_v2: dict[str, Any],
    version: int,
    non_causal: bool | None,
    causal: bool,
) -> None:
    """Sliding layers follow sliding_window_non_causal (default true for version 2 only), full ones see all."""
    base = speculators_v1 if version == 1 else speculators_v2
    layers = base["transformer_layer_config"] | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 32,
    }
    base["sliding_window_non_causal"] = non_causal
    config = parse_drafter_config(write(base, transformer_layer_config=layers))
    assert [(layer.window, layer.causal) for layer in config.layers] == [(32, causal), (None, False), (32, causal)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aux_hidden_state_layer_ids": [0, 4]}, "layer ids >= 1; out of range: 0"),
        ({"aux_hidden_state_layer_ids": [4, 4]}, "duplicates: 4"),
        ({"mask_token_id": 1000}, r"mask_token_id': found 1000, expected an integer in \[0, 999\]"),
        ({"sample_from_anchor": True}, "anchor row proposes"),
        ({"draft_vocab_size": 1001}, "draft_vocab_size"),
        ({"speculators_model_type": "eagle3"}, "expected one of dflash, dflash2"),
        ({"block_size": 4}, "at least 8, because speculative_tokens is 7"),
    ],
)
def test_refused(write: Any, speculators_v1: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_drafter_config(write(speculators_v1, **changes))


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id", "transformer_layer_config"])
def test_missing(write: Any, speculators_v1: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}': found nothing"):
        parse_drafter_config(write(speculators_v1, **{key: None}))


def test_errors_name_the_nested_key(write: Any, speculators_v1: dict[str, Any]) -> None:
    speculators_v1["transformer_layer_config"]["hidden_size"] = "64"
    with pytest.raises(ConfigError, match=r"key 'transformer_layer_config\.hidden_size': found \"64\""):
        parse_drafter_config(write(speculators_v1))

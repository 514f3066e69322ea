"""z-lab's drafter format."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from trtllm_dflash.config.drafter import ConvConfig, SelectorConfig
from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"
DEMO_DRAFTER = Path(__file__).parents[2] / "examples" / "smollm2" / "drafter"


def parsed_layers(directory: Path) -> list[tuple[int | None, bool]]:
    return [(layer.window, layer.causal) for layer in parse_drafter_config(directory).layers]


def test_demo_drafter() -> None:
    config = parse_drafter_config(DEMO_DRAFTER)
    assert (config.version, config.source_format, config.num_layers) == (2, "z-lab", 3)
    assert config.target_layer_ids == (1, 8, 14, 21, 27)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (8, 16, 30)
    assert config.conv == ConvConfig(kernel_size=2, group_size=16)
    assert config.selector == SelectorConfig(rank=64, top_k=16)
    assert [(layer.window, layer.causal) for layer in config.layers] == [(1024, False)] * 3


def test_published_dflash2_fields(write: Any) -> None:
    """The field values of the published Muse-Glimmer-30B-DFlash2: multiplier, softcap, rope_parameters."""
    config = parse_drafter_config(
        write(
            {
                "architectures": ["DFlash2DraftModel"],
                "model_type": "qwen3",
                "dtype": "bfloat16",
                "vocab_size": 202048,
                "hidden_size": 6656,
                "intermediate_size": 19968,
                "num_hidden_layers": 5,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_theta": 500000.0, "type": "default"},
                "layer_types": [SLIDING] * 5,
                "use_sliding_window": True,
                "sliding_window": 2048,
                "max_window_layers": 5,
                "is_causal": False,
                "num_target_layers": 52,
                "block_size": 16,
                "dflash_config": {
                    "block_size": 16,
                    "mask_token_id": 201818,
                    "target_layer_ids": [1, 13, 25, 37, 49],
                    "conv_kernel_size": 2,
                    "conv_group_size": 16,
                    "selector_rank": 256,
                    "selector_top_k": 16,
                    "output_multiplier": 0.19611613513818404,
                    "final_logit_softcapping": 20.0,
                    "input_embedding_scale": 24.0,
                },
            }
        )
    )
    assert config.output_multiplier == 0.19611613513818404
    assert (config.final_logit_softcapping, config.input_embedding_scale) == (20.0, 24.0)
    assert (config.rope.theta, config.rope.rope_type) == (500000.0, "default")
    assert {(layer.window, layer.causal) for layer in config.layers} == {(2048, False)}


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_causality_and_window_are_the_references(
    write: Any, zlab_v1: dict[str, Any], zlab_v2: dict[str, Any], version: int, is_causal: bool | None
) -> None:
    """Mixed layers; what the reference computes from transformers' Qwen3Config is the oracle."""
    fields = {"layer_types": [SLIDING, FULL, SLIDING], "use_sliding_window": True, "sliding_window": 32}
    base = zlab_v1 if version == 1 else zlab_v2
    seen_by_reference = Qwen3Config(num_hidden_layers=3, **fields)
    expected = [
        (
            seen_by_reference.sliding_window if kind == SLIDING else None,
            kind == SLIDING if is_causal is None else is_causal,
        )
        for kind in seen_by_reference.layer_types
    ]
    assert parsed_layers(write(base, is_causal=is_causal, **fields)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 32},
        {"use_sliding_window": False, "sliding_window": 32},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        {"layer_types": [FULL] * 3, "sliding_window": 32},
    ],
)
def test_windows_without_sliding_layer_types_are_transformers(
    write: Any, zlab_v1: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Where transformers' Qwen3Config and the file do not disagree, its reading is ours."""
    seen = Qwen3Config(num_hidden_layers=3, **fields)
    expected = [seen.sliding_window if kind == SLIDING else None for kind in seen.layer_types]
    assert [window for window, _ in parsed_layers(write(zlab_v1, **fields))] == expected


def test_flagless_sliding_layers_keep_their_window_and_say_so(
    write: Any, zlab_v1: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3Config would drop the window in silence."""
    directory = write(zlab_v1, layer_types=[SLIDING, FULL, SLIDING], sliding_window=32)
    with caplog.at_level(logging.WARNING):
        layers = parsed_layers(directory)
    assert layers == [(32, True), (None, False), (32, True)]
    assert "use_sliding_window" in caplog.text


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"layer_types": [SLIDING] * 3, "use_sliding_window": False, "sliding_window": 32}, "use_sliding_window"),
        ({"layer_types": [FULL] * 3, "use_sliding_window": True, "sliding_window": 32}, "layer_types"),
        ({"layer_types": [SLIDING] * 3, "use_sliding_window": True}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 32}, "max_window_layers"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, "max_window_layers"),
        ({"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 32}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"layer_types": [SLIDING] * 3, "use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_swa": True}, "swa_window_size"),
        ({"use_swa": True, "swa_window_size": 32, "sliding_window": 64}, "sliding_window"),
        ({"use_swa": True, "swa_window_size": 32, "use_sliding_window": False}, "use_sliding_window"),
        ({"use_swa": False, "layer_types": [SLIDING] * 3, "sliding_window": 32}, "use_swa"),
        ({"swa_window_size": 32}, "swa_window_size"),
    ],
)
def test_contradictory_windows(write: Any, zlab_v1: dict[str, Any], fields: dict[str, Any], key: str) -> None:
    """Never a guess."""
    with pytest.raises(ConfigError, match=rf"config\.json: key '(dflash_config\.)?{key}'"):
        parse_drafter_config(write(zlab_v1, **fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_swa": True, "swa_window_size": 32}, [(32, False)] * 3),
        ({"use_swa": True, "sliding_window": 32, "layer_types": [FULL] * 3}, [(32, False)] * 3),
        ({"use_swa": True, "swa_window_size": 32, "causal": True}, [(32, True)] * 3),
        (
            {"use_swa": True, "swa_window_size": 32, "layer_types": [SLIDING, FULL, SLIDING]},
            [(32, True), (None, False), (32, True)],
        ),
        ({"use_swa": False}, [(None, False)] * 3),
    ],
)
def test_swa_spelling(
    write: Any, zlab_v1: dict[str, Any], fields: dict[str, Any], expected: list[tuple[int | None, bool]]
) -> None:
    """``use_swa`` in dflash_config, as MiMo and ModelOpt write it."""
    nested = zlab_v1["dflash_config"] | {
        k: v for k, v in fields.items() if k in ("use_swa", "swa_window_size", "causal")
    }
    outer = {k: v for k, v in fields.items() if k not in nested}
    assert parsed_layers(write(zlab_v1, dflash_config=nested, **outer)) == expected


def test_recipe_at_top_level_equals_nested(write: Any, zlab_v2: dict[str, Any]) -> None:
    nested = parse_drafter_config(write(zlab_v2, "nested"))
    flat = {key: value for key, value in zlab_v2.items() if key != "dflash_config"} | zlab_v2["dflash_config"]
    assert parse_drafter_config(write(flat, "flat")) == nested


def test_recipe_given_twice_must_agree(write: Any, zlab_v1: dict[str, Any]) -> None:
    nested = zlab_v1["dflash_config"] | {"block_size": 4}
    with pytest.raises(ConfigError, match=r"dflash_config\.block_size': found 4, expected the same value.*8"):
        parse_drafter_config(write(zlab_v1, dflash_config=nested))


@pytest.mark.parametrize(("ids", "words"), [([1, 5, 5], "duplicates: 5"), ([-1, 5], "out of range: -1"), ([], "one")])
def test_bad_layer_ids(write: Any, zlab_v1: dict[str, Any], ids: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_drafter_config(write(zlab_v1, dflash_config={"mask_token_id": 7, "target_layer_ids": ids}))


def test_layer_id_range(write: Any, zlab_v1: dict[str, Any]) -> None:
    """The last layer may be captured, the one after it names the range."""
    last = write(zlab_v1, "last", dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 11]})
    assert parse_drafter_config(last).target_layer_ids == (0, 11)
    beyond = write(zlab_v1, "beyond", dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 12]})
    with pytest.raises(ConfigError, match=r"in \[0, 11\] \(the target has 12 layers\); out of range: 12"):
        parse_drafter_config(beyond)


def test_unsorted_layer_ids_keep_their_order(write: Any, zlab_v1: dict[str, Any]) -> None:
    """The columns of the features follow the file."""
    directory = write(zlab_v1, dflash_config={"mask_token_id": 7, "target_layer_ids": [9, 1, 5]})
    assert parse_drafter_config(directory).target_layer_ids == (9, 1, 5)


@pytest.mark.parametrize(
    ("target_layers", "drafter_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (12, 3, (1, 5, 9)),
        (48, 4, (1, 16, 30, 45)),
        (12, 1, (6,)),
    ],
)
def test_default_layer_ids_are_the_published_ones(
    write: Any, zlab_v1: dict[str, Any], target_layers: int, drafter_layers: int, expected: tuple[int, ...]
) -> None:
    """Without target_layer_ids the reference spreads them evenly; the first two are published drafters' lists."""
    directory = write(
        zlab_v1,
        num_hidden_layers=drafter_layers,
        num_target_layers=target_layers,
        dflash_config={"mask_token_id": 7},
    )
    assert parse_drafter_config(directory).target_layer_ids == expected


@pytest.mark.parametrize("target_layers", [1, 3, 4, 6])
def test_default_layer_ids_that_a_small_target_cannot_give(
    write: Any, zlab_v1: dict[str, Any], target_layers: int
) -> None:
    """Five ids out of so few layers: the even spread repeats some or leaves the target."""
    recipe = {"num_hidden_layers": 5, "num_target_layers": target_layers, "dflash_config": {"mask_token_id": 7}}
    with pytest.raises(ConfigError, match=r"target_layer_ids'.*(duplicates|out of range)"):
        parse_drafter_config(write(zlab_v1, **recipe))


@pytest.mark.parametrize("mask", [None, 1000, -1, 7.0, True])
def test_bad_mask_token(write: Any, zlab_v1: dict[str, Any], mask: Any) -> None:
    """Absent, one past the vocabulary, negative, not an integer."""
    nested = {"target_layer_ids": [1, 5, 9]} | ({} if mask is None else {"mask_token_id": mask})
    with pytest.raises(ConfigError, match=r"mask_token_id'.*expected an integer in \[0, 999\]"):
        parse_drafter_config(write(zlab_v1, dflash_config=nested))


@pytest.mark.parametrize("missing", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_partial_dflash2_recipe(write: Any, zlab_v2: dict[str, Any], missing: str) -> None:
    del zlab_v2["dflash_config"][missing]
    with pytest.raises(ConfigError, match=rf"dflash_config\.{missing}'.*needs all of"):
        parse_drafter_config(write(zlab_v2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selector_top_k": 1}, "selector_top_k': found 1, expected an integer in"),
        ({"conv_group_size": 24}, "conv_group_size': found 24, expected a divisor of hidden_size"),
        ({"selector_rank": 0}, "selector_rank"),
        ({"sample_from_anchor": True}, "anchor row proposes"),
        ({"attention_sink_bias": True}, "attention sinks"),
    ],
)
def test_dflash2_values(write: Any, zlab_v2: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_drafter_config(write(zlab_v2, dflash_config=zlab_v2["dflash_config"] | changes))


def test_dflash2_fields_under_dflash1_architecture(write: Any, zlab_v2: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is DFlash 1, this is a DFlash 2 field"):
        parse_drafter_config(write(zlab_v2, architectures=["DFlashDraftModel"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"attention_value_scale": 0.612}, "scale on attention values"),
        ({"v_head_dim": 8}, "value heads of another size"),
        ({"add_swa_attention_sink_bias": True}, "attention sinks"),
        ({"gating": "per-head"}, "gate per attention head"),
        ({"has_embed_tokens": True}, "embedding table of its own"),
        ({"hidden_act": "gelu"}, 'expected "silu"'),
        ({"block_size": 1}, "block_size"),
        ({"draft_vocab_size": 500}, "whole head"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
    ],
)
def test_unsupported_variants_by_name(write: Any, zlab_v1: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_drafter_config(write(zlab_v1, **changes))


def test_stored_mask_embedding(write: Any, zlab_v1: dict[str, Any]) -> None:
    """MiMo's mask_embedding.pt."""
    directory = write(zlab_v1)
    (directory / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt: found a stored mask embedding"):
        parse_drafter_config(directory)


def test_target_directory_given_as_drafter(write: Any) -> None:
    with pytest.raises(ConfigError, match="looks like a target model") as caught:
        parse_drafter_config(write({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    assert caught.value.hint is not None
    assert "swapped" in caught.value.hint


@pytest.mark.parametrize("cap", [0.0, -30.0])
def test_softcap_that_is_not_positive_is_off(write: Any, zlab_v1: dict[str, Any], cap: float) -> None:
    assert parse_drafter_config(write(zlab_v1, final_logit_softcapping=cap)).final_logit_softcapping is None


def test_sizes_that_are_left_out_are_transformers(
    write: Any, zlab_v1: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Of Qwen3Config; a block size, which it does not have, is the reference's, and that is said."""
    with caplog.at_level(logging.WARNING):
        config = parse_drafter_config(
            write(zlab_v1, head_dim=None, rms_norm_eps=None, num_key_value_heads=None, block_size=None)
        )
    assert (config.head_dim, config.rms_norm_eps) == (Qwen3Config().head_dim, Qwen3Config().rms_norm_eps)
    assert config.num_kv_heads == config.num_heads
    assert config.block_size == 16
    assert "no block_size; using 16" in caplog.text


@pytest.mark.parametrize(("number", "shown"), [(float("nan"), "NaN"), (10**400, "1000")], ids=["nan", "no float"])
def test_numbers_that_json_should_not_have(write: Any, zlab_v1: dict[str, Any], number: float, shown: str) -> None:
    directory = write(zlab_v1)
    text = json.dumps(zlab_v1 | {"rms_norm_eps": number})
    (directory / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"rms_norm_eps': found {shown}.*, expected a finite number > 0"):
        parse_drafter_config(directory)

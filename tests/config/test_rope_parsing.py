"""Rotary parameters: every place and spelling, one meaning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import LlamaConfig

from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.config.families import parse_target_config
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.errors import ConfigError

DEFAULT = RopeConfig(theta=5e5, rotary_dim=16)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}},
    ],
)
def test_spellings_of_the_default_rope(write: Any, zlab_v1: dict[str, Any], fields: dict[str, Any]) -> None:
    assert parse_drafter_config(write(zlab_v1 | {"rope_theta": None} | fields)).rope == DEFAULT


def test_no_theta_anywhere(write: Any, zlab_v1: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Transformers' default, said aloud."""
    with caplog.at_level(logging.WARNING):
        config = parse_drafter_config(write(zlab_v1, rope_theta=None))
    assert config.rope == RopeConfig(theta=10_000.0, rotary_dim=16)
    assert "no rope_theta" in caplog.text


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn(write: Any, zlab_v1: dict[str, Any], key: str) -> None:
    """Its own factor, which is not that of the two lengths here."""
    scaling = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}
    rope = parse_drafter_config(write(zlab_v1, **{key: scaling})).rope
    assert rope == RopeConfig(
        theta=1e4,
        rotary_dim=16,
        rope_type="yarn",
        factor=3.0,
        original_max_positions=128,
        beta_fast=16.0,
        beta_slow=1.0,
    )


def test_yarn_takes_its_factor_from_the_two_lengths(write: Any, zlab_v1: dict[str, Any]) -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 128}
    assert parse_drafter_config(write(zlab_v1, rope_scaling=scaling)).rope.factor == 4.0


def test_llama3_as_transformers_writes_it(write: Any, tmp_path: Any) -> None:
    fields = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        rope_parameters=fields,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    assert parse_target_config(tmp_path).rope == RopeConfig(
        theta=5e5,
        rotary_dim=16,
        rope_type="llama3",
        factor=8.0,
        original_max_positions=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "supported rope type: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "longrope"}}, 'rope_scaling.type\': found "longrope"'),
        ({"rope_parameters": {"rope_theta": 2e4}}, r"the same value as the top-level rope_theta \(10000\)"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"partial_rotary_factor": 0.25}, "partial rotary"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor': found nothing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "a finite number > 0"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "yarn", "factor": 2},
            },
            "disagree",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "different rotary parameters per layer type",
        ),
    ],
)
def test_refused(write: Any, zlab_v1: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_drafter_config(write(zlab_v1, **fields))

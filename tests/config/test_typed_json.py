"""Configuration dataclasses to JSON and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dflash.config.drafter import ConvConfig, DrafterConfig, DrafterLayerAttention, SelectorConfig
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.config.typed_json import from_json, to_json
from trtllm_dflash.errors import ConfigError

FILE = Path("config.json")
POSITIVE = st.integers(min_value=1, max_value=2**31)

ropes = st.builds(RopeConfig, theta=st.floats(1, 1e8), factor=st.floats(1, 100))
common = {
    "num_layers": POSITIVE,
    "vocab_size": POSITIVE,
    "rms_norm_eps": st.floats(1e-8, 1e-3),
    "rope": ropes,
}
targets = st.builds(TargetConfig, **common, sliding_windows=st.lists(st.none() | POSITIVE, max_size=4).map(tuple))
drafters = st.builds(
    DrafterConfig,
    **common,
    layers=st.lists(st.builds(DrafterLayerAttention), max_size=4).map(tuple),
    target_layer_ids=st.lists(st.integers(0, 100), max_size=5).map(tuple),
    conv=st.none() | st.builds(ConvConfig),
    selector=st.none() | st.builds(SelectorConfig),
    output_multiplier=st.floats(0, 10),
    final_logit_softcapping=st.none() | st.floats(0, 100),
    input_embedding_scale=st.floats(0, 100),
)


def through_text(value: Any, cls: type) -> Any:
    return from_json(cls, JsonObject(json.loads(json.dumps(to_json(value))), FILE))


@given(config=targets)
def test_target_round_trip(config: TargetConfig) -> None:
    assert through_text(config, TargetConfig) == config


@given(config=drafters)
def test_drafter_round_trip(config: DrafterConfig) -> None:
    assert through_text(config, DrafterConfig) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel_size": None}, "kernel_size': found null, expected a value of type int"),
        ({"kernel_size": True}, "kernel_size': found true"),
        ({"kernel_size": 2.5}, "kernel_size': found 2.5"),
        ({"taps": 2}, "no such field; known are kernel_size, group_size"),
    ],
)
def test_wrong_fields(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_json(ConvConfig, JsonObject({"kernel_size": 2, "group_size": 16} | change, FILE))


def test_missing_field() -> None:
    with pytest.raises(ConfigError, match="group_size': found nothing"):
        from_json(ConvConfig, JsonObject({"kernel_size": 2}, FILE))

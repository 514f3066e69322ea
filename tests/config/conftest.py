"""Configuration files as the publishers write them, small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]

ZLAB_V1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_target_layers": 12,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5, 9]},
}
ZLAB_V2: dict[str, Any] = ZLAB_V1 | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": ZLAB_V1["dflash_config"]
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "dtype": "bfloat16",
    "draft_vocab_size": 32,
    "block_size": 8,
    "aux_hidden_state_layer_ids": [2, 6, 9],
    "mask_token_id": 7,
    "sample_from_anchor": False,
    "transformer_layer_config": {
        key: ZLAB_V1[key]
        for key in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
        )
    }
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}],
        "default_proposal_method": "greedy",
    },
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a dictionary as DIR/config.json (keys given as None are left out) and return DIR."""

    def write_config(base: dict[str, Any], name: str = "model", **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        config = {key: value for key, value in (base | changes).items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return write_config

    return write


@pytest.fixture
def zlab_v1() -> dict[str, Any]:
    """A z-lab DFlash config.json."""
    return json.loads(json.dumps(ZLAB_V1))  # type: ignore[no-any-return]


@pytest.fixture
def zlab_v2() -> dict[str, Any]:
    """A z-lab DFlash 2 config.json."""
    return json.loads(json.dumps(ZLAB_V2))  # type: ignore[no-any-return]


@pytest.fixture
def speculators_v1() -> dict[str, Any]:
    """A Speculators DFlash config.json with a reduced vocabulary."""
    return json.loads(json.dumps(SPECULATORS))  # type: ignore[no-any-return]


@pytest.fixture
def speculators_v2(speculators_v1: dict[str, Any]) -> dict[str, Any]:
    """A Speculators DFlash 2 config.json."""
    return speculators_v1 | {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "draft_vocab_size": 1000,
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
    }

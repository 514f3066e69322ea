"""Configuration for TensorRT-LLM's own DFlash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.errors import CheckpointError, ConfigError
from trtllm_dflash.serving.trtllm_runtime import deploy_trtllm

yaml = pytest.importorskip("yaml")

# DFlashDecodingConfig of TensorRT-LLM 1.3.0rc27, public reference.
KNOWN = {
    "max_draft_len", "max_total_draft_tokens", "speculative_model", "max_concurrency", "draft_len_schedule",
    "load_format", "acceptance_rate_window_size", "acceptance_rate_threshold", "use_rejection_sampling",
    "allow_advanced_sampling", "advanced_sampling_mode", "enable_penalty", "mask_token_id", "target_layer_ids",
    "decoding_type", "attention_backend",
}  # fmt: skip


def _written(engines: Path, output: Path, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    deploy_trtllm(engines, output, **arguments)
    return tuple(yaml.safe_load((output / name).read_text()) for name in ("model.yaml", "trtllm_serve.yaml"))  # type: ignore


def test_the_pair_and_its_limits_are_taken_over(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    model, serve = _written(
        tiny_engines("llama-v2"), tmp_path / "out", target="org/target", drafter="org/target-DFlash2"
    )
    assert model["model"] == "org/target"
    assert (model["backend"], model["tensor_parallel_size"], model["pipeline_parallel_size"]) == ("pytorch", 1, 1)
    assert (model["max_batch_size"], model["max_seq_len"]) == (16, 256)
    assert model["triton_config"]["decoupled"] is True
    assert "model" not in serve
    speculative = model["speculative_config"]
    assert speculative == serve["speculative_config"]
    assert speculative.keys() <= KNOWN
    assert speculative["decoding_type"] == "DFlash"
    assert speculative["speculative_model"] == "org/target-DFlash2"


def test_the_anchor_is_not_counted(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    engines = tiny_engines("llama-v2", block_size=3)
    model, _ = _written(engines, tmp_path / "out", target="a/b", drafter="a/c")
    assert model["speculative_config"]["max_draft_len"] == 2


def test_directories_it_was_converted_from_are_the_default(
    tiny_engines: Callable[..., Path], tiny_pairs: Callable[[str], Any], tmp_path: Path
) -> None:
    model, _ = _written(tiny_engines("llama-v2"), tmp_path / "out")
    pair = tiny_pairs("llama-v2")
    assert (model["model"], model["speculative_config"]["speculative_model"]) == (str(pair.target), str(pair.drafter))


def test_only_its_own_directory_is_replaced(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    engines, output = tiny_engines("llama-v2"), tmp_path / "out"
    names = {"target": "a/b", "drafter": "a/c"}
    deploy_trtllm(engines, output, **names)
    with pytest.raises(CheckpointError, match="already exists"):
        deploy_trtllm(engines, output, **names)
    deploy_trtllm(engines, output, force=True, **names)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not what this command writes"):
        deploy_trtllm(engines, other, force=True, **names)


def test_choices_are_written_in_tensorrt_llms_words(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    model, serve = _written(
        tiny_engines("llama-v2"), tmp_path / "out", target="a/b", drafter="a/c", block_size=2, max_running=3,
        prefix_cache=False, kv_cache_tokens=640,
    )  # fmt: skip
    for document in (model, serve):
        assert document["speculative_config"]["max_draft_len"] == 1
        assert document["max_batch_size"] == 3
        cache = {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False, "max_tokens": 640}
        assert document["kv_cache_config"] == cache


@pytest.mark.parametrize("choices", [{"speculation": "off"}, {"block_size": 1}])
def test_plain_decoding_has_no_speculative_config(
    tiny_engines: Callable[..., Path], tmp_path: Path, choices: dict[str, Any]
) -> None:
    model, serve = _written(tiny_engines("llama-v2"), tmp_path / "out", target="a/b", **choices)
    assert "speculative_config" not in {**model, **serve}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"block_size": 99}, "block size is 99, expected 1 to"),
        ({"max_running": 17}, "max running is 17, expected 1 to 16"),
        ({"kv_cache_tokens": 1}, "KV cache tokens are 1, expected at least"),
        ({"speculation": "off", "block_size": 2}, "plain decoding has no blocks"),
        ({"speculation": "off"}, "drafter is 'a/c' without speculation"),
    ],
)
def test_choices_that_cannot_be_are_refused(
    tiny_engines: Callable[..., Path], tmp_path: Path, choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy_trtllm(tiny_engines("llama-v2"), tmp_path / "out", target="a/b", drafter="a/c", **choices)
    assert not (tmp_path / "out").exists()


def test_the_demo_pair_needs_names(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir()
    source = tiny_engines("llama-v2")
    for path in source.rglob("*"):
        if path.is_dir():
            (engines / path.relative_to(source)).mkdir()
        else:
            (engines / path.relative_to(source)).write_bytes(path.read_bytes())
    import json

    config = json.loads((engines / "config.json").read_text())
    config["source"] = {"target": {"name": "demo", "revision": None}, "drafter": {"name": "demo", "revision": None}}
    (engines / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="converted from 'demo'"):
        deploy_trtllm(engines, tmp_path / "out")

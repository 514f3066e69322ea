"""Target configurations, as transformers itself writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from trtllm_dflash.config.families import families, family_named, parse_target_config
from trtllm_dflash.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def save(config: PretrainedConfig, directory: Path, **changes: Any) -> Path:
    config.save_pretrained(directory)
    file = directory / "config.json"
    written = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not ...}))
    return directory


def llama(directory: Path, **changes: Any) -> Path:
    return save(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16"), directory, **changes)


def test_llama(tmp_path: Path) -> None:
    config = parse_target_config(llama(tmp_path))
    assert (config.family, config.architecture, config.dtype) == ("llama", "LlamaForCausalLM", "bfloat16")
    assert (config.num_layers, config.head_dim, config.num_kv_heads) == (3, 16, 2)
    assert not any((config.qk_norm, config.attention_bias, config.mlp_bias, config.tie_word_embeddings))
    assert config.sliding_windows == (None, None, None)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), None)


def test_llama_of_transformers_4(tmp_path: Path) -> None:
    """torch_dtype, rope_theta at top level, no head_dim, no key/value heads: Llama 2's config.json."""
    changes = {"torch_dtype": "float16", "dtype": ..., "rope_theta": 1e4, "rope_parameters": ..., "head_dim": ...}
    config = parse_target_config(llama(tmp_path, **changes, num_key_value_heads=...))
    assert (config.dtype, config.head_dim, config.num_kv_heads, config.rope.theta) == ("float16", 16, 4, 1e4)


def test_llama_biases(tmp_path: Path) -> None:
    config = parse_target_config(llama(tmp_path, attention_bias=True, mlp_bias=True))
    assert config.attention_bias
    assert config.attention_output_bias
    assert config.mlp_bias


def test_qwen3(tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    parsed = parse_target_config(save(config, tmp_path))
    assert (parsed.family, parsed.head_dim, parsed.qk_norm, parsed.tie_word_embeddings) == ("qwen3", 32, True, True)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_sizes_that_are_left_out_are_transformers(tmp_path: Path, kind: type[PretrainedConfig]) -> None:
    architecture = {"LlamaConfig": "LlamaForCausalLM", "Qwen3Config": "Qwen3ForCausalLM"}[kind.__name__]
    config = kind(**SIZES, architectures=[architecture])
    parsed = parse_target_config(save(config, tmp_path, head_dim=..., rms_norm_eps=..., tie_word_embeddings=...))
    assert (parsed.head_dim, parsed.rms_norm_eps) == (config.head_dim, config.rms_norm_eps)
    assert parsed.tie_word_embeddings == config.tie_word_embeddings


def test_qwen3_windows_are_transformers(tmp_path: Path) -> None:
    config = Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1, architectures=["Qwen3ForCausalLM"]
    )
    assert parse_target_config(save(config, tmp_path / "saved")).sliding_windows == (None, 32, 32)
    without_types = save(config, tmp_path / "derived", layer_types=...)
    assert parse_target_config(without_types).sliding_windows == (None, 32, 32)


def test_qwen3_sliding_layers_without_the_flag(tmp_path: Path) -> None:
    """Transformers would run full attention."""
    config = Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"])
    directory = save(config, tmp_path, layer_types=["sliding_attention"] * 3, sliding_window=32, use_sliding_window=...)
    with pytest.raises(ConfigError, match="use_sliding_window': found nothing, expected true"):
        parse_target_config(directory)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [7, 2], (7, 2)),
        (None, None, ()),
        (None, 3, (3,)),
        ([2, 2], None, (2,)),
    ],
)
def test_eos_ids(tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    """generation_config.json decides where it names any, as in transformers' generate."""
    directory = llama(tmp_path, eos_token_id=in_config)
    if in_generation is not None:
        GenerationConfig(eos_token_id=in_generation).save_pretrained(directory)
    assert parse_target_config(directory).eos_token_ids == expected


def test_dtype_override(tmp_path: Path) -> None:
    assert parse_target_config(llama(tmp_path), dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"vision_config": {"depth": 2}}, "multimodal"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unquantised weights"),
        ({"hidden_act": "gelu"}, 'hidden_act\': found "gelu", expected "silu"'),
        ({"architectures": ["MixtralForCausalLM"]}, "LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "exactly one architecture"),
        ({"architectures": ...}, "architectures': found nothing"),
        ({"architectures": ..., "architecture": "LlamaForCausalLM"}, "this directory was converted already"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads"),
        ({"hidden_size": -64}, "hidden_size': found -64, expected an integer >= 1"),
        ({"hidden_size": True}, "hidden_size': found true"),
        ({"hidden_size": 64.0}, "hidden_size': found 64.0"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"eos_token_id": 1000}, r"expected ids in \[0, 999\]"),
        ({"dtype": "float8_e4m3fn"}, "expected one of float32, float16, bfloat16"),
        ({"head_dim": 15}, "an even number"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_target_config(llama(tmp_path, **changes))
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention", "linear_attention", "full_attention"]}, "layer_types': found .*linear"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "a supported target architecture: LlamaForCausalLM"),
    ],
)
def test_targets_with_recurrent_layers_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Their state cannot be cut back to the accepted drafts by a context length."""
    config = Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ConfigError, match=words):
        parse_target_config(save(config, tmp_path, **changes))


@pytest.mark.parametrize("drafter", ["zlab_v1", "zlab_v2", "speculators_v1", "speculators_v2"])
def test_drafter_directory_given_as_target(write: Any, request: pytest.FixtureRequest, drafter: str) -> None:
    with pytest.raises(ConfigError, match="this directory holds a DFlash drafter") as caught:
        parse_target_config(write(request.getfixturevalue(drafter)))
    assert caught.value.hint is not None
    assert "swapped" in caught.value.hint


def test_registry() -> None:
    assert set(families()) >= {"llama", "qwen3"}
    assert family_named("qwen3").architectures == ("Qwen3ForCausalLM",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "found a JSON list"),
        pytest.param('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read as JSON: .*digits", id="number"),
        pytest.param("[" * 100_000, "cannot be read as JSON: .*recursion", id="depth"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        parse_target_config(tmp_path)

"""config.json of one model in TensorRT-LLM's checkpoint layout: its keys, plus our own typed object beside them."""

from __future__ import annotations

import json
from pathlib import Path

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.mapping import KvCacheDtype, ParallelMapping, QuantAlgo, QuantizationConfig
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.config.typed_json import from_json, to_json

TARGET_KEY, DRAFTER_KEY = "dflash_target", "dflash_drafter"
_QUANT_NAMES: dict[QuantAlgo, str | None] = {
    "none": None,
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8": "W8A16",
    "nvfp4": "NVFP4",
}


def write_target_config(
    file: Path, config: TargetConfig, mapping: ParallelMapping, quantization: QuantizationConfig
) -> None:
    """Write ``target/config.json``."""
    keys = _trtllm_keys(config, config.architecture, mapping, quantization)
    _write(file, keys | {"tie_word_embeddings": config.tie_word_embeddings, TARGET_KEY: to_json(config)})


def write_drafter_config(file: Path, config: DrafterConfig, mapping: ParallelMapping) -> None:
    """Write ``drafter/config.json``. A drafter's weights are never quantised and its cache has the compute dtype."""
    architecture = "DFlash2DraftModel" if config.version == 2 else "DFlashDraftModel"
    keys = _trtllm_keys(config, architecture, mapping, QuantizationConfig())
    _write(file, keys | {"tie_word_embeddings": False, DRAFTER_KEY: to_json(config)})


def read_target_config(file: Path) -> tuple[TargetConfig, ParallelMapping, QuantizationConfig]:
    """Read ``target/config.json`` back.

    Raises:
        ConfigError: by file and key.
    """
    return parse_target_config(read_json(file))


def parse_target_config(root: JsonObject) -> tuple[TargetConfig, ParallelMapping, QuantizationConfig]:
    """The same from a parsed object: an engine directory holds it as ``pretrained_config``."""
    mapping = ParallelMapping(root.child("mapping").integer("tp_size", minimum=1))
    quantization = root.child("quantization")
    name = quantization.optional_string("quant_algo")
    algo = next((algo for algo, known in _QUANT_NAMES.items() if known == name), None)
    if algo is None:
        raise quantization.error("quant_algo", "null or one of " + ", ".join(n for n in _QUANT_NAMES.values() if n))
    kv_name = quantization.optional_string("kv_cache_quant_algo")
    if kv_name not in (None, "FP8"):
        raise quantization.error("kv_cache_quant_algo", "null or FP8")
    kv_cache_dtype: KvCacheDtype = "auto" if kv_name is None else "fp8"
    return from_json(TargetConfig, root.child(TARGET_KEY)), mapping, QuantizationConfig(algo, kv_cache_dtype)


def read_drafter_config(file: Path) -> DrafterConfig:
    """Read ``drafter/config.json`` back.

    Raises:
        ConfigError: by file and key.
    """
    return from_json(DrafterConfig, read_json(file).child(DRAFTER_KEY))


def _trtllm_keys(
    config: TargetConfig | DrafterConfig,
    architecture: str,
    mapping: ParallelMapping,
    quantization: QuantizationConfig,
) -> dict[str, object]:
    return {
        "architecture": architecture,
        "dtype": config.dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.rope.theta,
        "rotary_scaling": _rotary_scaling(config.rope),
        "use_parallel_embedding": mapping.tp_size > 1,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": mapping.tp_size, "tp_size": mapping.tp_size, "pp_size": 1},
        "quantization": {
            "quant_algo": _QUANT_NAMES[quantization.algo],
            "kv_cache_quant_algo": "FP8" if quantization.kv_cache_dtype == "fp8" else None,
            "group_size": 16 if quantization.algo == "nvfp4" else None,
            "smoothquant_val": None,
            "clamp_val": None,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": ["lm_head", "transformer.vocab_embedding"] if quantization.algo != "none" else None,
        },
    }


def _rotary_scaling(rope: RopeConfig) -> dict[str, object] | None:
    if rope.rope_type == "default":
        return None
    values = {key: value for key, value in to_json(rope).items() if key not in ("theta", "rotary_dim")}
    return {key: value for key, value in values.items() if value is not None}


def _write(file: Path, root: dict[str, object]) -> None:
    file.write_text(json.dumps(root, indent=2) + "\n", encoding="utf-8")

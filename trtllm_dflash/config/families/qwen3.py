"""Qwen3 dense decoders: Llama's shape with RMSNorm on query and key heads and optional sliding windows."""

from __future__ import annotations

from trtllm_dflash.config.families.dense_decoder import parse_dense_decoder
from trtllm_dflash.config.families.family import Family
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.layer_windows import layer_windows
from trtllm_dflash.config.target import TargetConfig


def _parse(config: JsonObject, architecture: str, dtype: str) -> TargetConfig:
    layers = layer_windows(config, num_layers=config.integer("num_hidden_layers", minimum=1), infer_flag=False)
    return parse_dense_decoder(
        config,
        family="qwen3",
        architecture=architecture,
        dtype=dtype,
        # transformers' Qwen3Config has a fixed default here, not hidden_size / heads.
        head_dim_default=128,
        qk_norm=True,
        rms_norm_eps_default=1e-6,
        mlp_bias=False,
        sliding_windows=tuple(layer.window for layer in layers),
    )


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), parse=_parse)

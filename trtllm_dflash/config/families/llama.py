"""Llama 2, 3, 3.1, 3.2, SmolLM2 and everything else saved as ``LlamaForCausalLM``."""

from __future__ import annotations

from trtllm_dflash.config.families.dense_decoder import parse_dense_decoder
from trtllm_dflash.config.families.family import Family
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.target import TargetConfig


def _parse(config: JsonObject, architecture: str, dtype: str) -> TargetConfig:
    if config.has("layer_types") and set(config.strings("layer_types")) != {"full_attention"}:
        raise config.error("layer_types", 'only "full_attention" (transformers\' Llama has no other)')
    return parse_dense_decoder(
        config,
        family="llama",
        architecture=architecture,
        dtype=dtype,
        head_dim_default=None,
        qk_norm=False,
        rms_norm_eps_default=1e-6,
        mlp_bias=config.boolean("mlp_bias", default=False),
        sliding_windows=(None,) * config.integer("num_hidden_layers", minimum=1),
    )


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), parse=_parse)

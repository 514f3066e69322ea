"""Random pairs of shapes that the CUDA kernels take, in sessions on a GPU."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from tiny_pair import PAIRS, write_target

from trtllm_dflash.config.drafter import ConvConfig, DrafterConfig, DrafterLayerAttention, SelectorConfig
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.random_weights import random_session
from trtllm_dflash.engine.torch_session import KernelChoice, TorchSession

LIMITS = BuildLimits(max_batch_size=16, max_seq_len=256, max_num_tokens=96, block_size=8, page_tokens=32)
VOCAB = 512


@cache
def tokenizer_directory() -> Path:
    """A folder with a tokenizer of fewer ids than ``VOCAB``, kept until the process ends."""
    folder = Path(tempfile.mkdtemp()) / "target"
    write_target(folder, PAIRS["llama-v2"][0])
    return folder


def target_config(family: str, dtype: str) -> TargetConfig:
    """Four layers, 8 query heads on 2 KV heads of 64; Qwen3 with head norms and a window in every second layer."""
    qwen3 = family == "qwen3"
    return TargetConfig(
        family=family,
        architecture="Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM",
        dtype=dtype,
        vocab_size=VOCAB,
        num_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e4, 64),
        max_position_embeddings=512,
        tie_word_embeddings=not qwen3,
        qk_norm=qwen3,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        sliding_windows=(None, 48, None, 48) if qwen3 else (None,) * 4,
        bos_token_id=None,
        eos_token_ids=(1,),
        pad_token_id=None,
    )


def drafter_config(version: int, target: TargetConfig) -> DrafterConfig:
    """Two layers, the second with a window and causal inside the block; version 2 with convolutions and selector."""
    two = version == 2
    return DrafterConfig(
        version=2 if two else 1,
        source_format="z-lab",
        dtype=target.dtype,
        vocab_size=target.vocab_size,
        draft_vocab_size=None,
        num_layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        target_hidden_size=target.hidden_size,
        rope=RopeConfig(1e4, 64),
        max_position_embeddings=512,
        qk_norm=target.qk_norm,
        attention_bias=False,
        layers=(DrafterLayerAttention(None, False), DrafterLayerAttention(40, True)),
        block_size=8,
        mask_token_id=2,
        target_layer_ids=(0, 2, 3),
        num_target_layers=4,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        input_embedding_scale=1.0,
        conv=ConvConfig(2, 32) if two else None,
        selector=SelectorConfig(32, 16) if two else None,
    )


def gpu_session(
    kind: str,
    dtype: str,
    *,
    kernels: KernelChoice,
    quantization: QuantAlgo = "none",
    target_cache_dtype: torch.dtype | None = None,
) -> TorchSession:
    """A session of ``kind`` (``llama-v1``, ``llama-v2``, ``qwen3-v2``); equal weights for equal kind and dtype."""
    torch.manual_seed(17)
    family, version = kind.split("-v")
    target = target_config(family, dtype)
    return random_session(
        target,
        drafter_config(int(version), target),
        LIMITS,
        device=torch.device("cuda:0"),
        kernels=kernels,
        quantization=quantization,
        target_cache_dtype=target_cache_dtype,
    )

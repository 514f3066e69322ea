"""Small random checkpoints in the publishers' formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 192, 250, 4, 6, 2, 32
DRAFTER_LAYERS, TARGET_LAYER_IDS, RANK = 2, (0, 2, 3), 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
}


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Apply ``change`` to the tensors of ``directory/model.safetensors``."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of ``directory/config.json``."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_target(directory: Path, *, family: str = "llama", dtype: str = "float32", **fields: Any) -> Path:
    """A random target saved by transformers, with a tokenizer."""
    torch.manual_seed(1)
    common = SIZES | {"num_hidden_layers": LAYERS, "tie_word_embeddings": False} | fields
    model = LlamaForCausalLM(LlamaConfig(**common)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**common))
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh norms are all ones and biases all zeros: a swapped pair would go unnoticed.
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def drafter_tensors(version: int, *, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Random tensors by z-lab's names."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tensors = {
        "fc.weight": random(HIDDEN, len(TARGET_LAYER_IDS) * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
    }
    for n in range(DRAFTER_LAYERS):
        layer = f"layers.{n}."
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = random(count * HEAD_DIM, HIDDEN)
        tensors[f"{layer}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = random(HEAD_DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = random(HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = random(INNER, HIDDEN)
        tensors[f"{layer}mlp.down_proj.weight"] = random(HIDDEN, INNER)
        if version == 2:
            for side in ("attention_conv", "mlp_conv"):
                tensors[f"{layer}{side}.base_kernel"] = random(2, 2, HIDDEN)
                tensors[f"{layer}{side}.kernel_projection.weight"] = random(2 * 2 * HIDDEN // 16, HIDDEN)
    if version == 2:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = random(vocab, RANK)
        tensors["candidate_selector.hidden_projection.weight"] = random(RANK, HIDDEN)
    return tensors


def write_zlab(directory: Path, version: int = 2, *, vocab: int = VOCAB, **fields: Any) -> Path:
    """A random drafter in z-lab's format."""
    recipe: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": list(TARGET_LAYER_IDS)}
    if version == 2:
        recipe |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}
    config = SIZES | {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "vocab_size": vocab,
        "num_hidden_layers": DRAFTER_LAYERS,
        "num_target_layers": LAYERS,
        "block_size": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
        "dflash_config": recipe,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | fields))
    save_file(drafter_tensors(version, vocab=vocab), directory / "model.safetensors")
    return directory


def write_speculators(directory: Path, *, draft_vocab: int = VOCAB, **fields: Any) -> Path:
    """A random DFlash drafter in the Speculators format; a reduced vocabulary takes every seventh token."""
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": draft_vocab,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [i + 1 for i in TARGET_LAYER_IDS],
        "mask_token_id": 3,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "transformer_layer_config": SIZES
        | {
            "model_type": "qwen3",
            "num_hidden_layers": DRAFTER_LAYERS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    tensors = drafter_tensors(1)
    if draft_vocab != VOCAB:
        ids = torch.arange(draft_vocab) * 7
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, value=True)
        tensors["lm_head.weight"] = torch.randn(draft_vocab, HIDDEN).to(torch.bfloat16)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, directory / "model.safetensors")
    return directory

"""A tiny random target and drafters for it, written as Hugging Face directories.

Weights are random but not arbitrary, so that speculation is real although nothing is trained:

- Dimension 0 of the residual stream is a constant that no layer changes. The head uses it to favour sixteen tokens
  (``ACTIVE``), so the output distribution is small enough to be enumerated exactly.
- The next token depends mostly on the last one. The DFlash 2 selector's codebooks are that dependence, so its walk is
  often, not always, accepted.
- A DFlash 1 drafter proposes what its own noise prefers among the same sixteen tokens, and is sometimes accepted.

Several active tokens are single bytes of multi-byte characters: generated text is full of unfinished characters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Family = Literal["llama", "qwen3"]

BOS, EOS, MASK, USER, ASSISTANT = range(5)
SPECIAL_TOKENS = ("<s>", "</s>", "<mask>", "<|user|>", "<|assistant|>")
MERGES = (("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "a"), ("i", "n"), ("e", "r"), ("o", "u"), ("s", "t"))
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES)
HIDDEN = 64
MAX_POSITIONS = 512
_CONSTANT = 3.0
_CONSTANT_SHARE = 0.35
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_id(byte: int) -> int:
    """Token id of one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return len(SPECIAL_TOKENS) + alphabet.index(_BYTE_TO_CHARACTER[byte])


def _byte_to_character() -> dict[int, str]:
    """GPT-2's map of bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTE_TO_CHARACTER = _byte_to_character()
# Letters, white space, the bytes of "é" and of the first character of "日本", EOS, and two merged tokens.
_ACTIVE_BYTES = (*b"abcde \n", *"é".encode(), *"日".encode())
ACTIVE = (
    EOS,
    *(byte_id(byte) for byte in _ACTIVE_BYTES),
    len(SPECIAL_TOKENS) + 256,
    len(SPECIAL_TOKENS) + 257,
    byte_id(ord("f")),
)
"""Ids that the target gives nearly all its mass to."""


@dataclass(frozen=True)
class TargetRecipe:
    """A target to write.

    ``rope`` is merged into its rotary parameters; ``window`` is given to every second layer of a Qwen3 target;
    ``favourite`` makes one token likelier than the others, which gives DFlash 1 something to guess; ``biased``
    projections add something, where the family can.
    """

    family: Family = "llama"
    tied: bool = False
    layers: int = 4
    window: int | None = None
    seed: int = 0
    favourite: float = 0.6
    rope: dict[str, Any] = field(default_factory=dict)
    biased: bool = False


@dataclass(frozen=True)
class DrafterRecipe:
    """A drafter to write; ``extra`` is merged into ``dflash_config``, ``top_level`` into the configuration."""

    version: Literal[1, 2] = 2
    block_size: int = 6
    target_layer_ids: tuple[int, ...] = (2, 0, 3)
    layers: int = 2
    seed: int = 1
    candidates: int = 20
    extra: dict[str, Any] = field(default_factory=dict)
    top_level: dict[str, Any] = field(default_factory=dict)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with BOS in front of text and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def write_target(directory: Path, recipe: TargetRecipe) -> None:
    """Write the target with its tokenizer."""
    directory.mkdir(parents=True)
    model = random_target(recipe)
    model.save_pretrained(directory)
    write_tokenizer(directory)


def random_target(recipe: TargetRecipe) -> PreTrainedModel:
    """The target as a transformers model, float32."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": recipe.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | recipe.rope,
        "attention_bias": recipe.biased,
    }
    generator = torch.Generator().manual_seed(recipe.seed)
    if recipe.family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape, mlp_bias=recipe.biased))
    else:
        if recipe.window is not None:
            kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(recipe.layers)]
            shape |= {"use_sliding_window": True, "sliding_window": recipe.window, "layer_types": kinds}
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random_weight(name, weight.shape, generator, 0.12 if recipe.tied else 0.3))
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        favoured = torch.full((VOCAB_SIZE,), -2 * _CONSTANT)
        favoured[list(ACTIVE)] = _CONSTANT
        favoured[ACTIVE[1]] += recipe.favourite
        if not recipe.tied:
            head[:, 1:] *= 0.22
            head[:, 0] = favoured
            embedding[:, 0] = _CONSTANT
        else:
            embedding[:, 1:] *= 0.35
            embedding[:, 0] = favoured
        # Otherwise a token's likeliest successor in a tied target would be itself.
        model.model.norm.weight *= torch.randint(0, 2, (HIDDEN,), generator=generator) * 2 - 1
        # The mask row starts the drafter's blocks: the constant and nothing else.
        embedding[MASK] = 0.0
        embedding[MASK, 0] = _CONSTANT
        model.model.norm.weight[0] = 1.0
    return model.eval()


def write_drafter(directory: Path, recipe: DrafterRecipe, target: PreTrainedModel) -> None:
    """Write a z-lab drafter for ``target``."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(drafter_config(recipe, target), indent=1), encoding="utf-8")
    save_file(drafter_tensors(recipe, target), directory / "model.safetensors", metadata={"format": "pt"})


def drafter_config(recipe: DrafterRecipe, target: PreTrainedModel) -> dict[str, Any]:
    """The z-lab config.json."""
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if recipe.version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.config.num_hidden_layers,
        "block_size": recipe.block_size,
    }
    fields: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(recipe.target_layer_ids)}
    if recipe.version == 2:
        fields |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": HIDDEN,
            "selector_top_k": recipe.candidates,
        }
    config["dflash_config"] = fields | recipe.extra
    return config | recipe.top_level


def drafter_tensors(recipe: DrafterRecipe, target: PreTrainedModel) -> dict[str, Tensor]:
    """Random weights under z-lab's names; the selector knows how the target's head follows its embedding."""
    generator = torch.Generator().manual_seed(recipe.seed)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(recipe.target_layer_ids) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for n in range(recipe.layers):
        layer = f"layers.{n}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (64, HIDDEN),
            layer + "self_attn.k_proj.weight": (32, HIDDEN),
            layer + "self_attn.v_proj.weight": (32, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, 64),
            layer + "self_attn.q_norm.weight": (16,),
            layer + "self_attn.k_norm.weight": (16,),
            layer + "mlp.gate_proj.weight": (80, HIDDEN),
            layer + "mlp.up_proj.weight": (80, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, 80),
        }
        if recipe.top_level.get("attention_bias"):
            biases = {"q": 64, "k": 32, "v": 32, "o": HIDDEN}
            shapes |= {f"{layer}self_attn.{name}_proj.bias": (rows,) for name, rows in biases.items()}
        if recipe.version == 2:
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{conv}.base_kernel"] = (2, 2, HIDDEN)
                shapes[f"{layer}{conv}.kernel_projection.weight"] = (2 * 2 * HIDDEN // 16, HIDDEN)
    tensors = {name: _random_weight(name, shape, generator, 0.2) for name, shape in shapes.items()}
    # The constant then weighs about as much in the head's logits as it does in the target.
    tensors["norm.weight"][0] = _CONSTANT_SHARE
    if recipe.version == 2:
        tensors |= _selector(target, generator)
    return tensors


def _selector(target: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    head = target.get_output_embeddings().weight.detach()
    with torch.no_grad():
        alone = target.model(torch.arange(VOCAB_SIZE)[:, None]).last_hidden_state[:, 0]
    # Dimension 0 of the drafter's final state is about constant, so this projection is about one everywhere.
    projection = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.02
    projection[:, 0] = HIDDEN**-0.5 / _CONSTANT_SHARE
    predecessor = alone.clone()
    predecessor[:, 0] = 0.0
    return {
        "candidate_selector.predecessor_codebook": predecessor,
        "candidate_selector.successor_codebook": head.clone(),
        "candidate_selector.hidden_projection.weight": projection,
    }


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator, layer_gain: float) -> Tensor:
    weight = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * weight
    if name.endswith(".bias"):
        weight = 0.2 * weight
        if "o_proj" in name or "down_proj" in name:
            # The constant dimension of the residual stream.
            weight[0] = 0.0
        return weight
    if "base_kernel" in name:
        weight = 0.2 * weight
        weight[:, 0] += 1.0
        return weight
    if len(shape) == 2 and "embed" not in name:
        weight = weight / shape[1] ** 0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight = weight * layer_gain
            # The constant dimension of the residual stream.
            weight[0] = 0.0
        if "lm_head" in name:
            weight = weight * shape[1] ** 0.5
        if "kernel_projection" in name:
            weight = weight * 0.3
    return weight


PAIRS: dict[str, tuple[TargetRecipe, DrafterRecipe]] = {
    # Drafter windows smaller than most contexts, seen both ways; layer ids unsorted, the last layer among them.
    "llama-v2": (
        TargetRecipe("llama", tied=True),
        DrafterRecipe(
            2,
            top_level={
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"],
                "is_causal": False,
            },
        ),
    ),
    # Windows in the target too; without is_causal the drafter's sliding layer is causal and the full one is not.
    "qwen3-v1": (
        TargetRecipe("qwen3", window=16, seed=6, favourite=1.3),
        DrafterRecipe(
            1,
            block_size=4,
            layers=3,
            target_layer_ids=(1, 3),
            top_level={
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
        ),
    ),
    "qwen3-v2": (
        TargetRecipe("qwen3", seed=8),
        DrafterRecipe(
            2,
            block_size=5,
            candidates=9,
            extra={"output_multiplier": 0.5, "final_logit_softcapping": 12.0, "input_embedding_scale": 1.5},
        ),
    ),
    "llama-v1": (
        TargetRecipe("llama", seed=9, favourite=0.9),
        DrafterRecipe(1, block_size=6, target_layer_ids=(3, 1, 0, 2), top_level={"is_causal": True}),
    ),
    # Every projection that may have a bias has one.
    "llama-bias": (
        TargetRecipe("llama", seed=5, biased=True),
        DrafterRecipe(2, block_size=5, top_level={"attention_bias": True}),
    ),
}
"""The pairs that most tests use, by name."""

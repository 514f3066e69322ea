"""The demo target's GGUF to a Hugging Face directory: weights dequantised to float32, configuration, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_dflash.checkpoint.demo_tokenizer import write_tokenizer
from trtllm_dflash.checkpoint.progress import Progress
from trtllm_dflash.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from trtllm_dflash.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_hf_directory(gguf_file: Path, directory: Path, progress: Progress) -> None:
    """Dequantise a Llama GGUF with tied embeddings into ``directory`` (existing and empty).

    Args:
        gguf_file: the GGUF. directory: gets config.json, generation_config.json, model.safetensors (float32) and
            the tokenizer.
        progress: called after each tensor.

    Raises:
        CheckpointError: the gguf package is missing, or the file is not such a model.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(
            "the demo target is stored as GGUF and the package that reads it, gguf, is not installed",
            hint='pip install "trtllm-dflash[demo]"',
        ) from None
    reader = GGUFReader(gguf_file)
    facts = _Facts(reader, gguf_file)
    _write_weights(reader.tensors, facts, directory / "model.safetensors", progress)
    _write_json(directory / "config.json", _hf_config(facts))
    special = {key: facts.integer(f"tokenizer.ggml.{key}") for key in _SPECIAL_IDS}
    _write_json(
        directory / "generation_config.json", {_SPECIAL_IDS[key]: special[key] for key in list(_SPECIAL_IDS)[:3]}
    )
    write_tokenizer(
        directory,
        tokens=facts.strings("tokenizer.ggml.tokens"),
        token_types=facts.integers("tokenizer.ggml.token_type"),
        merges=facts.strings("tokenizer.ggml.merges"),
        bos=special["bos_token_id"],
        eos=special["eos_token_id"],
        pad=special["padding_token_id"],
        unknown=special["unknown_token_id"],
        chat_template=facts.string("tokenizer.chat_template"),
        max_positions=facts.integer("llama.context_length"),
    )


_SPECIAL_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
    "unknown_token_id": "unk_token_id",
}


class _Facts:
    """Typed access to a GGUF's key-value section."""

    def __init__(self, reader: GGUFReader, file: Path) -> None:
        self._reader, self._file = reader, file

    def _value(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise CheckpointError(f"{self._file}: GGUF key '{key}' is missing")
        return field.contents()

    def integer(self, key: str) -> int:
        return int(self._value(key))  # type: ignore[call-overload, no-any-return]

    def number(self, key: str) -> float:
        # Stored as float32: 1e-05 reads as 9.99…e-06 unless printed in float32 first.
        return float(str(np.float32(self._value(key))))  # type: ignore[arg-type]

    def string(self, key: str) -> str:
        return str(self._value(key))

    def strings(self, key: str) -> list[str]:
        return [str(item) for item in self._value(key)]  # type: ignore[attr-defined]

    def integers(self, key: str) -> list[int]:
        return [int(item) for item in self._value(key)]  # type: ignore[attr-defined]


def _hf_config(facts: _Facts) -> dict[str, object]:
    heads, hidden = facts.integer("llama.attention.head_count"), facts.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": facts.integer("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": facts.integer("llama.feed_forward_length"),
        "num_hidden_layers": facts.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("llama.attention.head_count_kv"),
        "head_dim": facts.integer("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": facts.integer("llama.context_length"),
        "rms_norm_eps": facts.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("llama.rope.freq_base"),
        "rope_parameters": {"rope_theta": facts.number("llama.rope.freq_base"), "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": facts.integer("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(tensors: list[ReaderTensor], facts: _Facts, file: Path, progress: Progress) -> None:
    from gguf.quants import dequantize

    heads = {
        "attn_q": facts.integer("llama.attention.head_count"),
        "attn_k": facts.integer("llama.attention.head_count_kv"),
    }
    # GGUF lists dimensions innermost first.
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors}
    specs = [TensorSpec(_hf_name(name), torch.float32, shape) for name, shape in shapes.items()]
    writer, done, total = SafetensorsWriter(file, specs), 0, sum(spec.bytes for spec in specs)
    for tensor, spec in zip(tensors, specs, strict=True):
        values = dequantize(tensor.data, tensor.tensor_type).reshape(spec.shape)
        projection = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if projection in heads:
            values = _undo_row_order(values, heads[projection])
        writer.write(spec.name, torch.from_numpy(np.array(values)))
        done += spec.bytes
        progress("dequantising the demo target", done, total)
    writer.close()


def _undo_row_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two rotary halves of each head's rows; Hugging Face keeps them apart."""
    out_features, in_features = values.shape
    halves = out_features // heads // 2
    rows: NDArray[np.float32] = values.reshape(heads, halves, 2, in_features).swapaxes(1, 2)
    return rows.reshape(out_features, in_features)


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    blk, layer, part, ending = name.split(".")
    if blk != "blk" or part not in _LAYER_NAMES:
        raise CheckpointError(f"GGUF tensor '{name}' is not part of a Llama decoder with tied embeddings")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{ending}"


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

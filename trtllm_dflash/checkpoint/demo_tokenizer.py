"""The demo target's tokenizer, built from the GGUF's vocabulary and merges.

transformers makes a wrong one of this GGUF: without the split of digits, and with ``<|im_start|>`` as EOS.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_CONTROL = 3  # GGUF token type of special tokens


def write_tokenizer(
    directory: Path,
    *,
    tokens: Sequence[str],
    token_types: Sequence[int],
    merges: Sequence[str],
    bos: int,
    eos: int,
    pad: int,
    unknown: int,
    chat_template: str,
    max_positions: int,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Args:
        directory: an existing directory.
        tokens, token_types, merges: the GGUF's ``tokenizer.ggml`` lists; a token's id is its place.
        bos, eos, pad, unknown: ids of the special tokens.
        chat_template: Jinja template. max_positions: the model's context length.
    """
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    # SmolLM2 was trained on single digits; without this split "2024" becomes tokens the model has hardly seen.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        # The class that takes tokenizer.json as it is; model-specific classes rebuild the pre-tokenizer their own way.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "unk_token": tokens[unknown],
        "additional_special_tokens": [tokens[bos], tokens[eos]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")

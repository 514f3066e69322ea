"""Copying a tokenizer with its chat template into a checkpoint directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from trtllm_dflash.errors import CheckpointError

_REQUIRED = "tokenizer.json"
_FILES = (
    _REQUIRED,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def copy_tokenizer(source: Path, output: Path) -> bool:
    """Copy the tokenizer's files from ``source`` into the new directory ``output``.

    Returns:
        whether there was a tokenizer; without one nothing is made.

    Raises:
        CheckpointError: there is a tokenizer, but not in the tokenizer.json format.
    """
    if not (source / _REQUIRED).is_file():
        others = [name for name in _OTHER_TOKENIZERS if (source / name).is_file()]
        if others:
            raise CheckpointError(
                f"{source}: found a tokenizer in {others[0]}, expected {_REQUIRED}",
                hint="convert it: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        return False
    output.mkdir()
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    templates = source / "chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, output / "chat_templates")
    return True

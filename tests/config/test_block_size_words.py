"""Other tools' draft-length options."""

from __future__ import annotations

import pytest

from trtllm_dflash.config.block_size_words import translate_block_size
from trtllm_dflash.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "value", "block_size"),
    [
        ("--max-draft-len", 7, 8),
        ("max_draft_len", 15, 16),
        ("num_speculative_tokens", 7, 8),
        ("--speculative-num-draft-tokens", 8, 8),
    ],
)
def test_translation_is_printed(word: str, value: int, block_size: int) -> None:
    """Whether the anchor counts differs between tools."""
    translation = translate_block_size(word, value)
    assert translation.block_size == block_size
    assert (
        translation.line
        == f"{word} {value} means block size {block_size} ({block_size - 1} proposed tokens plus the anchor)"
    )


def test_our_own_word_needs_no_line() -> None:
    assert translate_block_size("--block-size", 8).line is None


@pytest.mark.parametrize(
    ("word", "value"), [("--max-draft-len", 0), ("--block-size", 1), ("num_speculative_tokens", -3)]
)
def test_too_short(word: str, value: int) -> None:
    with pytest.raises(ConfigError, match="expected at least 2"):
        translate_block_size(word, value)


def test_unknown_word() -> None:
    with pytest.raises(ConfigError, match="unknown draft-length option"):
        translate_block_size("--draft-tokens", 4)

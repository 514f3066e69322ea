"""Other tools' words for the length of a draft, translated to the block size S (anchor included)."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dflash.errors import ConfigError

_EXTRA_POSITIONS = {
    "max_draft_len": 1,
    "num_speculative_tokens": 1,
    "speculative_tokens": 1,
    "speculative_num_draft_tokens": 0,
    "speculative_dflash_block_size": 0,
    "block_size": 0,
}


@dataclass(frozen=True)
class BlockSizeTranslation:
    """``block_size`` S, and ``line``: the text to print, or None where nothing was translated."""

    block_size: int
    line: str | None


def translate_block_size(word: str, value: int) -> BlockSizeTranslation:
    """Translate one draft-length option.

    Args:
        word: the option's name, with dashes or underscores, leading dashes allowed.
        value: its value.

    Raises:
        ConfigError: an unknown word, or a block size below 2.
    """
    name = word.lstrip("-").replace("-", "_")
    if name not in _EXTRA_POSITIONS:
        raise ConfigError(f"'{word}': unknown draft-length option, expected one of {', '.join(_EXTRA_POSITIONS)}")
    block_size = value + _EXTRA_POSITIONS[name]
    if block_size < 2:
        raise ConfigError(f"{word} {value} means block size {block_size}, expected at least 2 (anchor + one draft)")
    if name == "block_size":
        return BlockSizeTranslation(block_size, None)
    proposed = f"{block_size - 1} proposed token{'s' if block_size > 2 else ''} plus the anchor"
    return BlockSizeTranslation(block_size, f"{word} {value} means block size {block_size} ({proposed})")

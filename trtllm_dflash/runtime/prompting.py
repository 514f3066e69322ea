"""The target's tokenizer: prompts to ids, chat messages through the template, bad words to token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_dflash.config.chat_messages import text_messages
from trtllm_dflash.errors import EngineError, RequestError

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]

PROMPT_KINDS = "text, token ids or chat messages"


class PromptEncoder:
    """Encodes prompts with the tokenizer of an engine directory.

    Args:
        directory: the ``tokenizer/`` folder; a fast tokenizer (tokenizer.json) is required for streaming.
        vocab_size: V of the target; larger ids are refused.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(directory.resolve()), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
        if not getattr(self._tokenizer, "is_fast", False):
            raise EngineError(f"{directory}: expected a fast tokenizer with tokenizer.json")
        self.vocab_size = vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def backend(self) -> Tokenizer:
        """The ``tokenizers`` object."""
        backend: Tokenizer = self._tokenizer.backend_tokenizer
        return backend

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Text (special tokens written in it are recognised), ids, or chat messages → ids.

        Raises:
            RequestError: not a prompt, empty, an id out of range, or chat messages the template refuses.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(_whole_characters("prompt", prompt))
        elif not isinstance(prompt, Sequence):
            raise RequestError("prompt", prompt, PROMPT_KINDS)
        elif len(prompt) and isinstance(prompt[0], dict):
            ids = self._encode_chat(prompt)
        else:
            ids = self._check_ids(prompt)
        if not ids:
            raise RequestError("prompt", prompt, "at least one token")
        return tuple(ids)

    def bad_word_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, at the start of text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            _whole_characters("bad_words", word)
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    sequences[ids] = None
        return tuple(sequences)

    def _encode_chat(self, messages: Sequence[object]) -> list[int]:
        if not self.has_chat_template:
            raise RequestError("prompt", "chat messages", "text or token ids: this target has no chat template")
        turns = text_messages(messages, "prompt")
        try:
            encoded = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise RequestError("prompt", "chat messages", f"messages that the chat template takes ({error})") from error
        return list(self._tokenizer.encode(_whole_characters("prompt", str(encoded)), add_special_tokens=False))

    def _check_ids(self, ids: Sequence[object]) -> list[int]:
        for token in ids:
            # Integral: numpy's integers are ids as well.
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < self.vocab_size:
                raise RequestError("prompt", token, f"token ids from 0 to {self.vocab_size - 1}")
        return [int(token) for token in ids]  # type: ignore[call-overload]


def _whole_characters(field: str, text: str) -> str:
    """``text``, refused where it has halves of characters: bytes of a terminal that are no UTF-8, lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at character {error.start}"
        raise RequestError(field, found, "text in UTF-8, without halves of surrogate pairs") from error
    return text

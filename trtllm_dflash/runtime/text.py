"""Text of a request: streaming detokenisation and stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextDelta(NamedTuple):
    """New text of some tokens; only the first ``tokens_used`` belong to the output when a stop string cut it."""

    text: str
    tokens_used: int
    stopped: bool


class TextStream:
    """Turns token ids into text that never splits a character and never leaks part of a stop string.

    Args:
        tokenizer: the target's tokenizer; special tokens have no text.
        stop: strings that end the output. include_stop: keep the stop string, or the stop token, in the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, include_stop: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._text = ""
        self._sent = 0

    def push(self, ids: Sequence[int], *, ended_by_stop_id: bool = False) -> TextDelta:
        """Add tokens; with ``ended_by_stop_id`` the last of them ended generation."""
        body = ids[:-1] if ended_by_stop_id else ids
        if not self._stop:
            self._text += self._decode(body)
        else:
            for used, token in enumerate(body, start=1):
                searched_from = max(0, len(self._text) - self._longest_stop + 1)
                self._text += self._decode((token,))
                cut = self._find_stop(searched_from)
                if cut is not None:
                    self._text = self._text[:cut]
                    self._ids = []
                    return TextDelta(self._take(len(self._text)), used, True)
        if ended_by_stop_id and self._include_stop:
            self._complete()
            self._text += self._tokenizer.decode([ids[-1]], skip_special_tokens=False)
            self._ids = []
        return TextDelta(self._take(len(self._text) - self._held_back()), len(ids), False)

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows."""
        self._complete()
        return self._take(len(self._text))

    def _decode(self, tokens: Sequence[int]) -> str:
        step, tokenizer, text = self._decoder.step, self._tokenizer, ""
        for token in tokens:
            self._ids.append(token)
            try:
                text += step(tokenizer, token) or ""
            except Exception as error:
                # Byte sequences that are no UTF-8 make the library lose its place; start afresh at this token.
                if "Invalid prefix" not in str(error):
                    raise
                self._decoder = DecodeStream(skip_special_tokens=True)
                step = self._decoder.step
                text += step(tokenizer, token) or ""
        return text

    def _complete(self) -> None:
        """Add the bytes of an unfinished last character (as replacement characters)."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if whole.startswith(self._text):
            self._text = whole

    def _take(self, end: int) -> str:
        start, self._sent = self._sent, max(end, self._sent)
        return self._text[start : self._sent]

    def _find_stop(self, start: int) -> int | None:
        """Where the text ends when a stop string is in it: the earliest match wins."""
        matches = [(at, len(text)) for text in self._stop if (at := self._text.find(text, start)) >= 0]
        if not matches:
            return None
        at, length = min(matches)
        return at + length if self._include_stop else at

    def _held_back(self) -> int:
        """Length of the longest tail of the text that may still become a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            if any(text.startswith(self._text[-length:]) for text in self._stop):
                return length
        return 0

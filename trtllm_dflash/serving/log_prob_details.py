"""Log probabilities with the text and bytes of every token, in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from trtllm_dflash.runtime.outputs import TokenLogprobs

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes that a token adds to the text.

    Byte-level vocabularies (GPT-2, Llama 3, Qwen) write each byte as one printable character; SentencePiece ones
    write a space as ``▁`` and rare bytes as ``<0xNN>``. A token may be a part of a character, so bytes are the only
    exact form.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # tokenizer.json says which of the two it is, somewhere in its decoder (often inside a Sequence).
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._byte_of = _byte_level_alphabet() if '"ByteLevel"' in json.dumps(decoder) else None
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def of(self, token_id: int) -> bytes:
        """Bytes of ``token_id``; empty for an id without a piece (rows that pad the vocabulary)."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if piece in self._special:
            return piece.encode()
        if self._byte_of is not None and all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def details(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, object]]:
        """One entry per output token: ``token``, ``bytes``, ``logprob`` and ``top_logprobs``."""
        return [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, object]:
        raw = self.of(token_id)
        # JSON has no minus infinity; a banned token's is as good as this.
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest for 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}

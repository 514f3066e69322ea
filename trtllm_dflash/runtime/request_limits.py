"""What a request may ask of the engine beside its sampling parameters, and how much of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.slots import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIAS_IDS, MAX_STOP_IDS

MAX_PRIORITY = 10
MAX_SALT_CHARACTERS = 256


def checked_priority(value: int) -> int:
    """An integer; larger is sooner. Raises ``RequestError``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or abs(int(value)) > MAX_PRIORITY:
        raise RequestError("priority", value, f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], larger is sooner")
    return int(value)


def checked_deadline(value: float | None) -> float | None:
    """Seconds, or None. Raises ``RequestError``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise RequestError("deadline_s", value, "a finite number of seconds > 0, or None")
    return float(value)


def checked_salt(value: str | None) -> str | None:
    """A short text, or None. Raises ``RequestError``."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARACTERS):
        raise RequestError("cache_salt", value, f"a text of 1 to {MAX_SALT_CHARACTERS} characters, or None")
    return value


def check_capacity(
    params: SamplingParams, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Limits of the slot tensors, and ids within the vocabulary."""
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError("stop_token_ids", f"{len(stop_ids)} ids", f"at most {MAX_STOP_IDS} ids, EOS included")
    if len(params.logit_bias) > MAX_BIAS_IDS:
        raise RequestError("logit_bias", f"{len(params.logit_bias)} ids", f"at most {MAX_BIAS_IDS} ids")
    if len(bad_words) > MAX_BAD_WORDS:
        raise RequestError("bad_words", f"{len(bad_words)} token sequences", f"at most {MAX_BAD_WORDS}")
    for word in bad_words:
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise RequestError("bad_words", f"a word of {len(word)} tokens", f"at most {MAX_BAD_WORD_TOKENS} tokens")
    for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(field, token, f"token ids from 0 to {vocab_size - 1}")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestError("logprobs", params.logprobs, f"at most {vocab_size}")

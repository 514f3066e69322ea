"""What a request may ask of the engine beside its sampling parameters, and how much of each."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

from trtllm_dflash.config.finite import is_finite
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError, shown
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
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not is_finite(value) or value <= 0:
        raise RequestError("deadline_s", value, "a finite number of seconds > 0, or None")
    return float(value)


def checked_salt(value: str | None) -> str | None:
    """A short text, or None. Raises ``RequestError``."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARACTERS):
        raise RequestError("cache_salt", value, f"a text of 1 to {MAX_SALT_CHARACTERS} characters, or None")
    return value


def output_room(
    prompt_tokens: int, params: SamplingParams, max_seq_len: int, *, held_tokens: int | None = None, must_fit: bool
) -> int:
    """Output tokens that a request may have: ``max_tokens``, cut to what the prompt leaves of the sequence.

    Args:
        prompt_tokens: length of the prompt. max_seq_len: prompt and output of one request.
        held_tokens: what the engine has room for, where that is less: no ``max_tokens`` means what fits there too. A
            number beyond it is not cut here but refused when the request is queued.
        must_fit: refuse a ``max_tokens`` that does not fit, as OpenAI's API does, instead of cutting it.

    Raises:
        RequestError: the prompt leaves no token, or ``max_tokens`` is more than it leaves and ``must_fit``.
    """
    most = max_seq_len if held_tokens is None else min(max_seq_len, held_tokens)
    if most == max_seq_len:
        name, step = "max_seq_len", "build the engine with a larger --max-seq-len"
        length = f"this model's maximum context length (max_seq_len) is {most} tokens of prompt and output"
    else:
        name, step = "the KV cache", "give the engine a larger KV cache"
        length = (
            f"this model's maximum context length here is {most} tokens of prompt and output, which its KV cache has"
        )
    if prompt_tokens + 1 > most:
        raise RequestError(
            "prompt",
            f"{prompt_tokens} tokens",
            f"at most {name} - 1 = {most - 1} tokens: {length}",
            hint=f"shorten the prompt, or {step}",
        )
    room = most - prompt_tokens
    if params.max_tokens is None:
        return room
    if must_fit and params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            params.max_tokens,
            f"at most {room}: {length}, and the prompt has {prompt_tokens}",
            hint=f"ask for fewer tokens, shorten the prompt, or {step}",
        )
    return min(params.max_tokens, max_seq_len - prompt_tokens)


def cut_warning(prompt_tokens: int, max_tokens: int, room: int) -> str:
    """What an output says that ended because ``max_tokens`` had been cut to ``room``."""
    return (
        f"max_tokens: got {shown(max_tokens)}, cut to {room}: the sequence is full (max_seq_len "
        f"{prompt_tokens + room}, of which the prompt has {prompt_tokens}); build the engine with a larger "
        "--max-seq-len for longer outputs"
    )


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

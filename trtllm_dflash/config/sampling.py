"""Sampling parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from trtllm_dflash.config.finite import is_finite
from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import RequestError, shown

MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-3
"""Temperatures below this are greedy: dividing logits by them would leave float32, and clients mean 0 by them."""

# More than any 64-bit number has; int() would refuse a few thousand with an error of its own.
_MAX_ID_DIGITS = 20

SpeculationMode = Literal["auto", "on", "off"]
"""``auto``: with a drafter, as far as it pays; ``on``: always the whole block; ``off``: plain decoding."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Values out of range raise ``RequestError`` naming field, value and range.

    The order of processing is: bad words, ``min_tokens`` and ``logit_bias`` on raw logits; repetition, presence and
    frequency penalties; temperature; top-k; top-p; min-p (the order of transformers' warpers, top-p on the
    distribution that top-k left).

    Attributes:
        max_tokens: at most this many output tokens, >= 1; None means up to the engine's max_seq_len.
        min_tokens: stop token ids (EOS included) are impossible before this many output tokens; at most max_tokens.
        temperature: >= 0; below 0.001 it is greedy.
        top_p: in (0, 1]. top_k: >= 0, 0 is off. min_p: in [0, 1], relative to the best token.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty, frequency_penalty: in [-2, 2]; over output tokens.
        logit_bias: token id → bias in [-100, 100]; -100 bans the token. Ids may be decimal strings, as in JSON.
        bad_words: strings that are never produced, as token sequences. One string or several.
        stop: strings that end generation, one or several; stop_token_ids: token ids that do.
        include_stop_in_output: keep the stop string or stop token in the text.
        ignore_eos: the model's own EOS does not end generation.
        seed: in [0, 2^64 - 1]; the same seed gives the same tokens alone or in any batch. None draws one.
        logprobs: number of top alternatives to report beside each chosen token (0 = the chosen one only), or None.
        structured_output: the form of the output: ``StructuredOutput`` or a mapping that its ``parse`` takes, or None.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    structured_output: StructuredOutput | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, without randomness."""
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "temperature": _number("temperature", self.temperature, "a finite number >= 0", low=0.0),
            "top_p": _number("top_p", self.top_p, "a number in (0, 1]", low=0.0, high=1.0, above_low=True),
            "top_k": _integer("top_k", self.top_k, 0, words="an integer >= 0 (0 switches it off)"),
            "min_p": _number("min_p", self.min_p, "a number in [0, 1]", low=0.0, high=1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, "a finite number > 0", low=0.0, above_low=True
            ),
            "logit_bias": _logit_bias(self.logit_bias),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, MAX_SEED),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _number(name, getattr(self, name), "a number in [-2, 2]", low=-2.0, high=2.0)
        for name in ("include_stop_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "true or false")
        if self.structured_output is not None:
            checked["structured_output"] = StructuredOutput.parse(self.structured_output)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", self.min_tokens, f"an integer in [0, max_tokens = {shown(self.max_tokens)}]"
            )


def _integer(name: str, value: object, minimum: int, maximum: int | None = None, *, words: str | None = None) -> int:
    if words is None:
        words = f"an integer >= {minimum}" if maximum is None else f"an integer in [{minimum}, {maximum}]"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(name, value, words)
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise RequestError(name, value, words)
    return number


def _number(
    name: str, value: object, words: str, *, low: float, high: float = math.inf, above_low: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not is_finite(value):
        raise RequestError(name, value, words)
    number = float(value)
    if not low <= number <= high or (above_low and number == low):
        raise RequestError(name, value, words)
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    words = "a string or a list of strings, none empty"
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise RequestError(name, value, words)
    if not all(isinstance(item, str) and item for item in items):
        raise RequestError(name, value, words)
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(name, value, "a list of token ids (integers >= 0)")
    return tuple(_integer(name, item, 0, words="token ids (integers >= 0)") for item in value)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", value, "a mapping of token id to bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON objects have string keys; anything that is not plain digits is a mistake, "-1" and "1.0" included.
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
        token_id = _integer("logit_bias", int(key) if is_digits else key, 0, words="token ids (integers >= 0) as keys")
        if token_id in biases:
            raise RequestError("logit_bias", key, "each token id once")
        biases[token_id] = _number("logit_bias", bias, "biases in [-100, 100]", low=-100.0, high=100.0)
    return biases

"""From the tensors of a Triton request to a prompt and ``SamplingParams``.

Three generations of client scripts are understood: the legacy ensemble's names (``stop_words``, ``random_seed``,
``min_length``, …), the ``sampling_param_*`` names of Triton's llmapi backend, and the core model's ``input_ids`` and
``request_output_len``. An input that this toolkit cannot honour is refused by name; none is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trtllm_dflash.config.chat_messages import text_messages
from trtllm_dflash.config.finite import is_finite
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import RequestError
from trtllm_dflash.serving.request_inputs import (
    ALIASES,
    ALWAYS_GIVEN,
    AS_MANY_AS_FIT,
    DEFAULT_MAX_TOKENS,
    GUIDES,
    NEUTRAL,
    UNSUPPORTED,
)

Fields = Mapping[str, Sequence[object]]
Value = TypeVar("Value", bool, int, float, str)


@dataclass(frozen=True)
class ChatRequest:
    """A prompt as messages.

    Attributes:
        messages: ``{"role", "content"}`` mappings, content a string. tools: function declarations in OpenAI's shape.
        template_values: more variables for the template, for example ``enable_thinking``.
    """

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...] = ()
    template_values: tuple[tuple[str, bool | int | float | str], ...] = ()


@dataclass(frozen=True)
class ServingRequest:
    """A validated request.

    Attributes:
        prompt: text, token ids or chat messages. params: how to decode it.
        stream: one response per delta, else exactly one response.
        log_probs: the client wants log probabilities; log_prob_details: with the text of each token and alternatives.
        echo: text to put before the output (``exclude_input_in_output`` false), else empty.
        priority: higher runs first. deadline_s: seconds after arrival at which it ends with an error, or None.
        cache_salt: only requests of the same salt share cached prefixes.
        max_tokens_must_fit: a ``max_tokens`` beyond what the prompt leaves is refused; otherwise it is cut.
    """

    prompt: str | list[int] | ChatRequest
    params: SamplingParams
    stream: bool
    log_probs: bool
    echo: str
    log_prob_details: bool = False
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str | None = None
    max_tokens_must_fit: bool = False


def parse_request(fields: Fields, *, eos_token_ids: Sequence[int], vocab_size: int) -> ServingRequest:
    """Translate and validate the inputs of one request.

    Args:
        fields: input name → flat list of values (``bool``, ``int``, ``float`` or ``str``).
        eos_token_ids: the model's own end tokens, to read ``end_id``. vocab_size: bound of token ids.

    Raises:
        RequestError: naming the input, its value and what is allowed.

    Defaults are the legacy ensemble's: greedy when none of temperature, top_k, top_p and min_p is given; ``top_p`` 0
    means that it is off; ``end_id`` -1 or one past the vocabulary means that end tokens do not end generation, any
    other id replaces the model's own.
    """
    reader = _Reader(_without_aliases(fields))
    for name, allowed in UNSUPPORTED.items():
        if reader.has(name):
            raise RequestError(name, reader.values(name)[0], allowed)
    for name, (neutral, allowed) in NEUTRAL.items():
        if reader.has(name) and reader.single(name) not in neutral:
            raise RequestError(name, reader.single(name), allowed)
        reader.drop(name)
    for name in ALWAYS_GIVEN:
        if reader.has(name):
            reader.take(name, bool, False)
    if (pad_id := reader.optional("pad_id", int)) is not None and not -1 <= pad_id < vocab_size:
        # Nothing is padded here, so a valid pad_id has no effect on any output.
        raise RequestError("pad_id", pad_id, f"a token id in 0..{vocab_size - 1}, or -1")

    prompt = _prompt(reader, vocab_size)
    stream = reader.take("stream", bool, False)
    log_probs = reader.take("return_log_probs", bool, False)
    echo = ""
    if not reader.take("exclude_input_in_output", bool, True):
        if not isinstance(prompt, str):
            raise RequestError("exclude_input_in_output", False, "true when the prompt is given as input_ids")
        echo = prompt
    top_log_probs = reader.optional("top_log_probs", int)
    priority = reader.take("priority", int, 0)
    deadline_s = reader.optional("deadline_s", float)
    if deadline_s is not None and deadline_s <= 0.0:
        raise RequestError("deadline_s", deadline_s, "a number of seconds > 0")
    if top_log_probs is None and log_probs:
        top_log_probs = 0
        details = False
    else:
        details = top_log_probs is not None
    cache_salt = reader.optional("cache_salt", str)
    must_fit = reader.take("max_tokens_must_fit", bool, False)
    params = _sampling(reader, eos_token_ids, vocab_size, top_log_probs)
    reader.finish()
    return ServingRequest(
        prompt=prompt,
        params=params,
        stream=stream,
        log_probs=log_probs,
        echo=echo,
        log_prob_details=details,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        max_tokens_must_fit=must_fit,
    )


def _prompt(reader: _Reader, vocab_size: int) -> str | list[int] | ChatRequest:
    given = [name for name in ("text_input", "input_ids", "chat_messages") if reader.has(name)]
    if len(given) > 1:
        raise RequestError(given[1], f"both {given[0]} and {given[1]}", "one of them")
    has_text, has_ids = reader.has("text_input"), reader.has("input_ids")
    if reader.has("chat_messages"):
        return ChatRequest(
            messages=tuple(text_messages(_json_objects(reader, "chat_messages"), "chat_messages")),
            tools=_json_objects(reader, "chat_tools"),
            template_values=_template_values(reader),
        )
    if has_ids:
        ids = [_typed("input_ids", value, int) for value in reader.values("input_ids")]
        length = reader.take("input_lengths", int, len(ids))
        if length != len(ids):
            raise RequestError("input_lengths", length, f"{len(ids)}, the number of input_ids")
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError("input_ids", token, f"token ids in 0..{vocab_size - 1}")
        if not ids:
            raise RequestError("input_ids", [], "at least one token id")
        return ids
    if not has_text:
        raise RequestError("text_input", None, "a prompt: text_input, input_ids or chat_messages")
    text = reader.take("text_input", str, "")
    if not text:
        raise RequestError("text_input", text, "at least one character")
    return text


def _json(reader: _Reader, name: str) -> object:
    text = reader.take(name, str, "")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(name, text[:40], "JSON text") from error


def _json_objects(reader: _Reader, name: str) -> tuple[Mapping[str, object], ...]:
    if not reader.has(name):
        return ()
    found = _json(reader, name)
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise RequestError(name, str(found)[:40], "a JSON list of objects, not empty")
    return tuple(found)


def _template_values(reader: _Reader) -> tuple[tuple[str, bool | int | float | str], ...]:
    name = "chat_template_kwargs"
    if not reader.has(name):
        return ()
    found = _json(reader, name)
    if not isinstance(found, dict) or not all(isinstance(value, bool | int | float | str) for value in found.values()):
        raise RequestError(name, str(found)[:40], "a JSON object of names and booleans, numbers or strings")
    return tuple(found.items())


def _structured_output(reader: _Reader) -> StructuredOutput | None:
    """TensorRT-LLM's two inputs: the type of guide, and the guide."""
    kind = reader.optional("guided_decoding_guide_type", str)
    guide = reader.optional("guided_decoding_guide", str)
    if kind is None and guide is None:
        return None
    if kind not in GUIDES:
        raise RequestError("guided_decoding_guide_type", kind, f"one of {', '.join(GUIDES)}")
    if kind == "json":
        if guide:
            raise RequestError("guided_decoding_guide", guide[:40], "no guide for type json (a schema: json_schema)")
        return StructuredOutput.parse({"json_object": True})
    if not guide:
        raise RequestError("guided_decoding_guide", guide, f"a text that is not empty for type {kind}")
    return StructuredOutput.parse({GUIDES[kind]: guide})


def _logit_bias(reader: _Reader) -> dict[int, float]:
    if not reader.has("logit_bias"):
        return {}
    found = _json(reader, "logit_bias")
    if not isinstance(found, dict):
        raise RequestError("logit_bias", str(found)[:40], "a JSON object of token id and bias")
    return found  # SamplingParams checks keys and values


def _sampling(
    reader: _Reader, eos_token_ids: Sequence[int], vocab_size: int, top_log_probs: int | None
) -> SamplingParams:
    top_k = reader.optional("top_k", int)
    top_p = reader.optional("top_p", float)
    min_p = reader.optional("min_p", float)
    temperature = reader.optional("temperature", float)
    greedy = temperature is None and min_p is None and not top_k and not top_p
    if top_p == 0.0:
        top_p = None
    if greedy:
        temperature = 0.0
    ignore_eos = reader.take("ignore_eos", bool, False)
    stop_token_ids = tuple(_typed("stop_token_ids", value, int) for value in reader.values("stop_token_ids"))
    end_id = reader.optional("end_id", int)
    if end_id is not None:
        if end_id < -1:
            raise RequestError("end_id", end_id, f"a token id in 0..{vocab_size - 1}, or -1 for none")
        if end_id == -1 or end_id >= vocab_size:
            ignore_eos = True  # a load generator of SGLang asks for 1048576, which no token is
        elif end_id not in eos_token_ids:
            ignore_eos, stop_token_ids = True, (*stop_token_ids, end_id)
    max_tokens = reader.take("max_tokens", int, DEFAULT_MAX_TOKENS)
    return SamplingParams(
        max_tokens=None if max_tokens == AS_MANY_AS_FIT else max_tokens,
        min_tokens=reader.take("min_tokens", int, 0),
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else top_k,
        min_p=0.0 if min_p is None else min_p,
        repetition_penalty=reader.take("repetition_penalty", float, 1.0),
        presence_penalty=reader.take("presence_penalty", float, 0.0),
        frequency_penalty=reader.take("frequency_penalty", float, 0.0),
        logit_bias=_logit_bias(reader),
        bad_words=reader.words("bad_words"),
        stop=reader.words("stop_words"),
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        seed=reader.optional("seed", int),
        include_stop_in_output=reader.take("include_stop_in_output", bool, False),
        logprobs=top_log_probs,
        structured_output=_structured_output(reader),
    )


def _without_aliases(fields: Fields) -> dict[str, Sequence[object]]:
    named: dict[str, tuple[str, Sequence[object]]] = {}
    for name, values in fields.items():
        canonical = ALIASES.get(name, name)
        if canonical in named and list(named[canonical][1]) != list(values):
            other, other_values = named[canonical]
            raise RequestError(
                name, list(values)[:4], f"the value of {other} ({list(other_values)[:4]}), its other name"
            )
        named[canonical] = (name, values)
    return {canonical: values for canonical, (_, values) in named.items()}


class _Reader:
    """Takes inputs one by one, so that what is left at the end is what nobody understood."""

    def __init__(self, fields: dict[str, Sequence[object]]) -> None:
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def drop(self, name: str) -> None:
        self._fields.pop(name, None)

    def values(self, name: str) -> list[object]:
        return list(self._fields.pop(name, ()))

    def single(self, name: str) -> object:
        values = self._fields[name]
        if len(values) != 1:
            raise RequestError(name, f"{len(values)} values", "one value")
        return values[0]

    def take(self, name: str, kind: type[Value], default: Value) -> Value:
        value = self.optional(name, kind)
        return default if value is None else value

    def optional(self, name: str, kind: type[Value]) -> Value | None:
        if name not in self._fields:
            return None
        value = self.single(name)
        self.drop(name)
        return _typed(name, value, kind)

    def words(self, name: str) -> tuple[str, ...]:
        # Legacy clients send one empty string for "none".
        return tuple(word for value in self.values(name) if (word := _typed(name, value, str)))

    def finish(self) -> None:
        for name in list(self._fields):
            raise RequestError(name, self.values(name)[0], "no value: this model has no such input")


def _typed(name: str, value: object, kind: type[Value]) -> Value:
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if not is_finite(value):
            raise RequestError(name, value, "a finite number")
        if kind is float or isinstance(value, int) or value.is_integer():
            return kind(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    words: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    raise RequestError(name, value, words[kind])

"""The bodies of requests: every field is known, strictly typed, and either honoured or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from trtllm_dflash.serving.gateway.api_errors import ApiError

INT32_MAX = 2**31 - 1
MAX_TOP_LOGPROBS = 20

# Triton cuts integers to 32 bits without a word, so the bounds are checked here.
Int32 = Annotated[StrictInt, Field(ge=-(2**31), le=INT32_MAX)]
Number = Annotated[StrictFloat | StrictInt, Field(ge=-1e30, le=1e30)]
StopWord = Annotated[StrictStr, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=INT32_MAX)]], Field(min_length=1)]

# Values that mean the same as not asking; anything else is refused with the reason.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "audio is not supported"),
    "modalities": ((["text"],), "text is the only modality"),
    "prediction": ((), "predicted outputs are not supported; the engine drafts by itself"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools"),
    "web_search_options": ((), "there is no web search"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "use priority"),
    "reasoning_effort": ((), "use chat_template_kwargs where the model's template has such a switch"),
    "verbosity": (("medium",), "the model has no such switch"),
    "parallel_tool_calls": ((True,), "tool calls are the model's text; they are not restricted"),
    "suffix": (("",), "infilling is not supported"),
    "length_penalty": ((1, 1.0), "it only has a meaning with beam search"),
    "use_beam_search": ((False,), "beam search does not combine with speculative decoding"),
    "prompt_logprobs": ((0,), "log probabilities of the prompt are not computed"),
    "truncate_prompt_tokens": ((), "shorten the prompt instead"),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: StrictBool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(_Body):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)

    name: StrictStr | None = None
    description: StrictStr | None = None
    # A BaseModel has methods called schema and json_schema, hence the alias.
    body: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None


class Tool(_Body):
    type: Literal["function"]
    function: dict[str, Any]


class SamplingBody(_Body):
    """What chat and plain completions have in common."""

    model: StrictStr
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: StopWord | Annotated[list[StopWord], Field(max_length=16)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: dict[Annotated[StrictStr, Field(pattern=r"^[0-9]{1,10}$")], Number] | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's: the names that vLLM and TensorRT-LLM use.
    top_k: Int32 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int32 | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[Int32], Field(max_length=64)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    bad_words: Annotated[list[StopWord], Field(max_length=64)] | None = None
    priority: Int32 | None = None
    deadline_s: Annotated[StrictFloat | StrictInt, Field(gt=0, le=1e6)] | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    # Without an effect on the text: who asks, and hints for caches.
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    metadata: dict[str, StrictStr] | None = None
    # Refused unless neutral.
    store: Any = None
    service_tier: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, StrictBool | StrictInt | StrictFloat | StrictStr] | None = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    parallel_tool_calls: Any = None


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: Any = None


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Parse and check a request body; raises ``ApiError`` 400 that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _readable(error.errors(include_url=False), raw) from None
    for name, (neutral, reason) in _NEUTRAL.items():
        value = getattr(body, name, None)
        # bool is an int in Python: 0 must not pass for False, nor 1 for True.
        if value is not None and not any(value == item and type(value) is type(item) for item in neutral):
            raise ApiError(
                400, f"{name}: this parameter is not supported: {reason}", param=name, code="unsupported_parameter"
            )
    _check_together(body)
    return body


def _check_together(body: ChatBody | CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "only together with stream: true")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise _invalid("top_logprobs", "only together with logprobs: true")
        given = (body.max_tokens, body.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            raise _invalid("max_tokens", "the same value as max_completion_tokens, its new name")
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400,
                "tool_choice: this parameter is not supported: none and auto are; the model decides, and its call is "
                "returned as text",
                param="tool_choice",
                code="unsupported_parameter",
            )
    elif body.best_of not in (None, body.n or 1):
        raise ApiError(
            400,
            "best_of: this parameter is not supported: expected none, or the value of n",
            param="best_of",
            code="unsupported_parameter",
        )
    form = body.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise _invalid("response_format.json_schema", "a schema exactly when type is json_schema")


def _invalid(param: str, expected: str) -> ApiError:
    return ApiError(400, f"{param}: expected {expected}", param=param, code="invalid_value")


def _readable(errors: Sequence[Mapping[str, Any]], raw: bytes) -> ApiError:
    """One error for the client: of a union's complaints the one that went deepest into the value.

    Equally deep ones that only say "another type" come from the members that were not meant.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    document = json.loads(raw)
    located = [(_path_in(document, error["loc"], missing=error["type"] == "missing"), error) for error in errors]
    names, worst = max(located, key=lambda pair: (len(pair[0]), not str(pair[1]["type"]).endswith("_type")))
    param = ".".join(map(str, names))[:200]
    kind, message = str(worst["type"]), str(worst["msg"])
    if kind == "extra_forbidden":
        text = f"{param}: this parameter is not supported"
        return ApiError(400, text, param=param, code="unsupported_parameter")
    if kind == "missing":
        return ApiError(400, f"{param}: this parameter is required", param=param, code="missing_required_parameter")
    if kind.endswith("_type"):
        # Every member wants another type there: say all of them.
        here = [str(error["msg"]) for path, error in located if path == names and str(error["type"]).endswith("_type")]
        message = " or ".join(dict.fromkeys([message, *(text.removeprefix("Input should be ") for text in here[1:])]))
    value = repr(worst.get("input"))
    shown = value if len(value) <= 100 else f"{value[:100]}…"
    text = f"{param or 'body'}: {message[0].lower()}{message[1:]}, got {shown}"
    return ApiError(400, text, param=param or None, code="invalid_value")


def _path_in(document: Any, location: Sequence[str | int], *, missing: bool) -> list[str | int]:
    """The parts of pydantic's location that are in the body; the others name the members of a union."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        inside = (isinstance(document, dict) and part in document) or (
            isinstance(document, list) and isinstance(part, int) and part < len(document)
        )
        if inside:
            document = document[part]
            path.append(part)
        elif missing and index == len(location) - 1:
            path.append(part)
    return path

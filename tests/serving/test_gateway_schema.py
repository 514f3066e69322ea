"""Request bodies: what is refused, and that every refusal names its field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic", reason="pip install 'trtllm-dflash[openai]'")

from trtllm_dflash.serving.gateway.api_errors import ApiError
from trtllm_dflash.serving.gateway.schema import ChatBody, CompletionBody, parse_body
from trtllm_dflash.serving.gateway.triton_inputs import inputs_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"model": "m", "prompt": "hi"}


def refusal(kind: type, body: object) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        inputs_of(parse_body(kind, raw), max_choices=64)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("nonsense", 1, "nonsense"),
        ("audio", {"voice": "x"}, "audio"),
        ("modalities", ["audio"], "modalities"),
        ("prediction", {"type": "content"}, "prediction"),
        ("functions", [{}], "functions"),
        ("store", True, "store"),
        ("store", 0, "store"),
        ("reasoning_effort", "high", "reasoning_effort"),
        ("tool_choice", "required", "tool_choice"),
        ("parallel_tool_calls", False, "parallel_tool_calls"),
        ("use_beam_search", True, "use_beam_search"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("top_logprobs", 2, "top_logprobs"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 2.5, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", 2**31, "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", 2**40, "top_k"),
        ("n", 0, "n"),
        ("n", 100, "n"),
        ("seed", 2**64, "seed"),
        ("stop", "", "stop"),
        ("stop", [""], "stop.0"),
        ("logit_bias", {"-1": 1}, "logit_bias.-1"),
        ("logit_bias", {"1": "x"}, "logit_bias.1"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("deadline_s", 0, "deadline_s"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None),
        ("messages", [{"role": "king", "content": "x"}], "messages.0.role"),
    ],
)
def test_refusals_name_the_field(field: str, value: object, param: str | None) -> None:
    error = refusal(ChatBody, {**CHAT, field: value})
    if param is None:
        assert error.param is not None
        assert error.param.startswith(field)
    else:
        assert error.param == param
    assert field in error.message


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [-1], [1, "x"], [1.5], None, {"a": 1}, [2**31]])
def test_prompts_that_are_none(prompt: object) -> None:
    assert (refusal(CompletionBody, {"model": "m", "prompt": prompt}).param or "").startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value", "param", "reason"),
    [
        ("stop", ["x"] * 17, "stop", "at most 16 items"),
        ("stop", ["x", ""], "stop.1", "at least 1 character"),
        ("prompt", [-1], "prompt.0", "greater than or equal to 0"),
        ("prompt", [[1, -1]], "prompt.0.1", "greater than or equal to 0"),
        ("prompt", [2**31], "prompt.0", "less than or equal to 2147483647"),
        ("prompt", [1.5], "prompt.0", "valid string or a valid integer or a valid array"),
        ("prompt", {"a": 1}, "prompt", "valid string or a valid array"),
        ("prompt", ["x", 1], "prompt.1", "valid string"),
        ("prompt", [], "prompt", "at least 1 item"),
        ("deadline_s", "x", "deadline_s", "valid number"),
    ],
)
def test_refusals_say_the_real_reason(field: str, value: object, param: str, reason: str) -> None:
    error = refusal(CompletionBody, {**PLAIN, field: value})
    assert error.param == param
    assert reason in error.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b'{"a":' * 5000, b'{"model": NaN}']
)
def test_bodies_that_are_not_requests(body: bytes) -> None:
    refusal(CompletionBody, body)


def test_lone_surrogates_are_not_text() -> None:
    refusal(CompletionBody, b'{"model": "m", "prompt": "\\ud800"}')


@pytest.mark.parametrize(
    "neutral",
    [{"store": False}, {"service_tier": "auto"}, {"functions": []}, {"modalities": ["text"]}, {"tool_choice": "none"},
     {"parallel_tool_calls": True}, {"top_p": None}, {"user": "me"}, {"metadata": {"a": "b"}}, {"stop": None},
     {"response_format": {"type": "text"}}, {"max_tokens": 4, "max_completion_tokens": 4}],
)  # fmt: skip
def test_values_that_change_nothing_are_accepted(neutral: dict[str, object]) -> None:
    assert parse_body(ChatBody, json.dumps({**CHAT, **neutral}).encode()).model == "m"


def test_null_means_absent_everywhere() -> None:
    nulls = dict.fromkeys(set(ChatBody.model_fields) - {"model", "messages"})
    assert inputs_of(parse_body(ChatBody, json.dumps({**CHAT, **nulls}).encode()), max_choices=1)


def test_tools_are_left_out_when_none_may_be_called() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    (inputs,) = inputs_of(parse_body(ChatBody, json.dumps({**CHAT, **tools}).encode()), max_choices=1)
    assert "chat_tools" not in inputs


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "x"})), _JSON)
def test_any_value_of_any_field_is_honoured_or_a_400(field: str, value: object) -> None:
    for kind, base in ((ChatBody, CHAT), (CompletionBody, PLAIN)):
        several: list[dict[str, object]] = []
        status = 400
        try:
            several = inputs_of(parse_body(kind, json.dumps({**base, field: value}).encode()), max_choices=64)
        except ApiError as error:
            status = error.status
            json.dumps(error.body()).encode()
        assert status == 400
        for inputs in several:  # nothing that Triton would cut or refuse by itself
            json.dumps(inputs, allow_nan=False).encode()
            for name, item in inputs.items():
                if isinstance(item, int) and name != "seed":
                    assert -(2**31) <= item < 2**31

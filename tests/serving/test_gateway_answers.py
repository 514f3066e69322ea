"""The front end in front of a scripted Triton: what it asks, what it answers, and what errors become."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")
pytest.importorskip("aiohttp", reason="pip install 'trtllm-dflash[openai]'")

from fake_triton import HELLO, Api, FakeTriton, event, last, running_gateway

DETAIL = {
    "token": "H",
    "bytes": [72],
    "logprob": -0.25,
    "top_logprobs": [{"token": "J", "bytes": [74], "logprob": -1.5}],
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeTriton, Api]]:
    with FakeTriton() as triton, running_gateway(triton.url) as api:
        yield triton, api


@pytest.fixture
def triton(server: tuple[FakeTriton, Api]) -> FakeTriton:
    triton = server[0]
    triton.script, triton.refusal = list(HELLO), None
    triton.inputs.clear()
    return triton


@pytest.fixture
def api(server: tuple[FakeTriton, Api], triton: FakeTriton) -> Api:
    return server[1]


def test_chat_answer(api: Api) -> None:
    status, answer, headers = api.chat()
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 2 / 14,
        "acceptance_histogram": [1, 0, 1, 0, 0, 0, 0, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 14,
        "num_spec_tokens": 7,
    }
    assert headers["x-request-id"]


def test_streamed_chat_with_usage(api: Api) -> None:
    chunks = api.chunks(stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "Hello."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_streamed_chat_without_usage_has_no_such_field(api: Api) -> None:
    assert not any("usage" in chunk or "metrics" in chunk for chunk in api.chunks())


def test_all_parameters_reach_the_model(api: Api, triton: FakeTriton) -> None:
    schema = {"type": "object"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    status, answer, _ = api.ask(
        "POST",
        "/v1/chat/completions",
        {
            "model": "dflash",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            "max_completion_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -1,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 2,
            "ignore_eos": True, "stop": "END", "stop_token_ids": [4], "logit_bias": {"5": -100}, "logprobs": True,
            "top_logprobs": 2, "tools": [tool], "tool_choice": "auto", "priority": 3, "deadline_s": 1.5,
            "chat_template_kwargs": {"enable_thinking": False}, "bad_words": ["x"], "user": "me", "n": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        },
    )  # fmt: skip
    assert status == 200, answer
    (inputs,) = triton.inputs
    assert inputs.pop("id") == answer["id"]
    assert json.loads(inputs.pop("chat_messages")) == [
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert json.loads(inputs.pop("chat_tools")) == [tool]
    assert json.loads(inputs.pop("logit_bias")) == {"5": -100}
    assert json.loads(inputs.pop("guided_decoding_guide")) == schema
    assert json.loads(inputs.pop("chat_template_kwargs")) == {"enable_thinking": False}
    assert inputs == {
        "max_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 2**64 - 1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 2,
        "ignore_eos": True, "stop_words": ["END"], "stop_token_ids": [4], "top_log_probs": 2, "priority": 3,
        "deadline_s": 1.5, "bad_words": ["x"], "guided_decoding_guide_type": "json_schema", "stream": True,
        "max_tokens_must_fit": True,
    }  # fmt: skip


def test_defaults_are_openais(api: Api, triton: FakeTriton) -> None:
    """Temperature 1; a chat may fill the model's length, a plain completion has 16 tokens."""
    api.chat()
    api.complete("hi")
    chat, plain = triton.inputs
    assert (chat["temperature"], chat["max_tokens"]) == (1.0, 2**31 - 1)
    assert (plain["temperature"], plain["max_tokens"], plain["text_input"]) == (1.0, 16, "hi")
    # A limit that nobody asked for is cut where it does not fit.
    assert "max_tokens_must_fit" not in {**chat, **plain}


def test_several_prompts_and_samples(api: Api, triton: FakeTriton) -> None:
    status, answer, _ = api.complete([[1, 2], [3]], n=2, seed=2**64 - 1)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 16, "total_tokens": 22}
    assert answer["metrics"] is None
    asked = {inputs["id"]: (inputs["input_ids"], inputs["seed"]) for inputs in triton.inputs}
    assert asked == {
        f"{answer['id']}-{index}": ([[1, 2], [3]][index // 2], [2**64 - 1, 0][index % 2]) for index in range(4)
    }


def test_logprobs_of_both_shapes(api: Api, triton: FakeTriton) -> None:
    triton.script = [event("H", [7], log_prob_details=json.dumps([DETAIL])), last("", [])]
    chat = api.chat(logprobs=True, top_logprobs=1)[1]["choices"][0]["logprobs"]
    assert chat == {"content": [DETAIL], "refusal": None}
    plain = api.complete("x", logprobs=1)[1]["choices"][0]["logprobs"]
    assert plain == {
        "tokens": ["H"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{"J": -1.5}],
        "text_offset": [0],
    }
    streamed = api.chunks(logprobs=True)
    assert [chunk["choices"][0]["logprobs"] for chunk in streamed[1:]] == [{"content": [DETAIL]}, {"content": []}]


@pytest.mark.parametrize("echo_apart", [True, False])
def test_text_offsets_count_the_echoed_prompt(api: Api, triton: FakeTriton, echo_apart: bool) -> None:
    """The engine sends the echo first, but it may share an event with the first tokens; text may be held back."""

    def details(*tokens: str) -> str:
        return json.dumps([{**DETAIL, "token": token, "bytes": list(token.encode())} for token in tokens])

    start = [event("hello", []), event("A", [7], log_prob_details=details("A"))]
    if not echo_apart:
        start = [event("helloA", [7], log_prob_details=details("A"))]
    held = event("", [8], log_prob_details=details("bcde"))
    triton.script = [*start, held, last("bcdefg", [9, 10], log_prob_details=details("f", "g"))]
    offsets = [5, 6, 10, 11]
    (choice,) = api.complete("hello", echo=True, logprobs=1)[1]["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("helloAbcdefg", offsets)
    text = api.complete("hello", echo=True, logprobs=1, stream=True)[1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    found = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert [offset for some in found for offset in some] == offsets


def test_offsets_of_a_character_in_two_tokens(api: Api, triton: FakeTriton) -> None:
    entries = [
        {**DETAIL, "token": token, "bytes": raw} for token, raw in (("a\ufffd", [97, 0xC3]), ("\ufffdb", [0xA9, 98]))
    ]
    end = {**DETAIL, "token": "c", "bytes": [99]}
    triton.script = [
        event("aéb", [1, 2], log_prob_details=json.dumps(entries)),
        last("c", [3], log_prob_details=json.dumps([end])),
    ]
    (choice,) = api.complete("x", logprobs=1)[1]["choices"]
    assert choice["text"] == "aébc"
    assert choice["logprobs"]["text_offset"] == [0, 2, 3]


def test_events_cut_anywhere_are_joined(api: Api, triton: FakeTriton) -> None:
    """A long event arrives in pieces, and many short ones in one."""
    triton.script = [event("é" * 200_000, list(range(50))), *[event("x", [1])] * 500, last("", [])]
    answer = api.chat()[1]
    assert answer["choices"][0]["message"]["content"] == "é" * 200_000 + "x" * 500
    assert answer["usage"]["completion_tokens"] == 550


@pytest.mark.parametrize(
    ("refusal", "status", "param", "code"),
    [
        ((400, "INVALID_ARGUMENT: stop_words: got [''], expected words"), 400, "stop", "invalid_value"),
        ((400, "INVALID_ARGUMENT: text_input: got '9 tokens', expected at most 8"), 400, "prompt", "invalid_value"),
        ((400, "UNAVAILABLE: queue: got 8 waiting requests; try again in 7 s"), 429, None, "queue_full"),
        ((400, "UNAVAILABLE: the engine is restarting; try again"), 503, None, "engine_unavailable"),
        ((400, "DEADLINE_EXCEEDED: deadline_s: passed"), 504, "deadline_s", "deadline_exceeded"),
        ((400, "INTERNAL: the engine failed"), 500, None, "engine_error"),
        ((400, "Stub process 'engine_0_0' is not healthy."), 503, None, "engine_unavailable"),
        ((404, "Request for unknown model: 'dflash' is not found"), 503, None, "engine_unavailable"),
        ((500, "Traceback: /srv/models/x.py line 3"), 502, None, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_the_right_status(
    api: Api, triton: FakeTriton, refusal: tuple[int, str], status: int, param: str | None, code: str, stream: bool
) -> None:
    triton.refusal = refusal
    found, body, headers = api.chat(stream=stream)
    assert found == status
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "/srv" not in json.dumps(body)
    assert ("retry-after" in headers) == (status in (429, 503))
    if status == 429:
        assert headers["retry-after"] == "7"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_that_does_not_fit_is_named_as_it_was_given(api: Api, triton: FakeTriton, name: str) -> None:
    length = "this model's maximum context length (max_seq_len) is 99 tokens of prompt and output"
    triton.refusal = (
        400,
        f"INVALID_ARGUMENT: max_tokens: got 500, expected at most 90: {length}, and the prompt has 9",
    )
    for stream in (False, True):
        status, body, _ = api.chat(stream=stream, **{name: 500})
        error = body["error"]
        assert (status, error["param"], error["code"]) == (400, name, "context_length_exceeded")
        assert error["message"].startswith(f"{name}: got 500, expected at most 90")
    triton.refusal = (400, "INVALID_ARGUMENT: text_input: got '9 tokens', expected at most 8")
    assert api.chat(**{name: 5})[1]["error"]["param"] == "prompt"


def test_the_largest_number_is_a_number(api: Api, triton: FakeTriton) -> None:
    """To Triton's model it means "as many as fit", which no client asked for."""
    assert api.chat(max_tokens=2**31 - 1)[0] == 200
    assert triton.inputs[-1]["max_tokens"] == 2**31 - 2
    assert triton.inputs[-1]["max_tokens_must_fit"] is True
    assert api.chat()[0] == 200
    assert triton.inputs[-1]["max_tokens"] == 2**31 - 1


def test_error_texts_show_no_paths(api: Api, triton: FakeTriton) -> None:
    triton.refusal = (400, "INTERNAL: cannot read /srv/engines/llama/target/rank0.engine")
    assert api.chat()[1]["error"]["message"] == "cannot read <path>"


def test_error_in_the_middle_is_an_event(api: Api, triton: FakeTriton) -> None:
    triton.script = [event("Hel", [7]), 0.05, {"error": "UNAVAILABLE: the engine process ended while it ran this"}]
    *_, text, error = api.chunks()
    assert text["choices"][0]["delta"]["content"] == "Hel"
    assert error["error"]["code"] == "engine_unavailable"
    assert api.chat()[0] == 503  # as one document it is an error as a whole


def test_lost_connection_is_an_error(api: Api, triton: FakeTriton) -> None:
    triton.script = [event("Hel", [7])]
    assert api.chunks()[-1]["error"]["message"] == "the model server closed the connection"


def test_models_health_and_unknown_paths(api: Api) -> None:
    _, models, _ = api.ask("GET", "/v1/models")
    assert [(card["id"], card["object"], card["max_model_len"]) for card in models["data"]] == [("dflash", "model", 99)]
    assert api.ask("GET", "/v1/models/dflash")[1]["id"] == "dflash"
    assert api.ask("GET", "/v1/models/other")[0] == 404
    assert api.ask("GET", "/health")[:2] == (200, {"status": "ready", "replicas": ["ready"]})
    assert api.ask("GET", "/health/live")[0] == 200
    assert api.ask("GET", "/v1/nothing")[1]["error"]["code"] == "not_found"
    assert api.ask("GET", "/v1/completions")[1]["error"]["code"] == "method_not_allowed"
    assert api.ask("GET", "/docs")[0] == 404
    status, body, _ = api.ask("POST", "/v1/completions", {"model": "gpt", "prompt": "x"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_the_clients_request_id_comes_back(api: Api) -> None:
    body = {"model": "dflash", "prompt": "x"}
    assert api.ask("POST", "/v1/completions", body, {"x-request-id": "abc-1"})[2]["x-request-id"] == "abc-1"
    assert api.ask("POST", "/v1/completions", body, {"x-request-id": "a b\tc"})[2]["x-request-id"] != "a b\tc"

"""What the engine process does with chat messages and with the text of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_pair import write_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.outputs import TokenLogprobs
from trtllm_dflash.serving.chat_prompt import ChatTemplate
from trtllm_dflash.serving.log_prob_details import TokenBytes
from trtllm_dflash.serving.request_fields import ChatRequest, parse_request

USER = {"role": "user", "content": "hé"}


def write(directory: Path, template: str | None = None) -> ChatTemplate:
    write_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return ChatTemplate(directory)


def test_messages_become_the_templates_tokens(tmp_path: Path) -> None:
    chat = write(tmp_path)
    ids = chat.encode(ChatRequest((USER,)))
    assert chat.tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hé\n<|assistant|>\n"
    assert ids.count(chat.tokenizer.token_to_id("<s>")) == 0  # the template says where it goes


def test_tools_and_values_reach_the_template(tmp_path: Path) -> None:
    chat = write(tmp_path, "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ enable_thinking }}")
    tool = {"type": "function", "function": {"name": "abc", "parameters": {}}}
    ids = chat.encode(ChatRequest((USER,), (tool,), (("enable_thinking", False),)))
    assert chat.tokenizer.decode(ids) == "abcFalse"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[0].content.nothing.at_all }}",
    ],
    ids=["refusal", "subclasses", "mutation", "endless", "globals", "undefined"],
)
def test_a_template_can_refuse_but_not_escape(tmp_path: Path, template: str) -> None:
    """Templates come with checkpoints: they run in Jinja's immutable sandbox."""
    chat = write(tmp_path, template)
    with pytest.raises(RequestError) as caught:
        chat.encode(ChatRequest((USER,)))
    assert caught.value.field == "chat_messages"
    assert "subprocess" not in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "not a name"])
def test_clients_cannot_replace_the_template(tmp_path: Path, name: str) -> None:
    chat = write(tmp_path)
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        chat.encode(ChatRequest((USER,), (), ((name, "{{ 1 }}"),)))


def test_no_template_is_said(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="this target has no chat template"):
        ChatTemplate(tmp_path).encode(ChatRequest((USER,)))


def test_bytes_of_every_token_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = write(tmp_path).tokenizer
    of = TokenBytes(tokenizer).of
    for text in ("the é 日本 \U0001f600\n\t", " a an th", "\x00\xff"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(of, ids)) == text.encode()
    assert of(tokenizer.token_to_id("<|user|>")) == b"<|user|>"
    assert of(10**6) == b""


def test_bytes_of_sentencepiece_pieces() -> None:
    tokenizer = Tokenizer(BPE(vocab={"▁the": 0, "<0xE2>": 1, "é": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    of = TokenBytes(tokenizer).of
    assert [of(token) for token in range(3)] == [b" the", b"\xe2", "é".encode()]


def test_details_have_openais_shape(tmp_path: Path) -> None:
    tokenizer = write(tmp_path).tokenizer
    a, e = (tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ("a", "é"))
    found = TokenBytes(tokenizer).details([TokenLogprobs(a, -0.5, ((e, -1.0), (a, float("-inf"))))])
    assert found == [
        {
            "token": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "�", "bytes": [0xC3], "logprob": -1.0},
                {"token": "a", "bytes": [97], "logprob": -9999.0},
            ],
        }
    ]
    json.dumps(found, allow_nan=False)


def parse(**inputs: object):
    fields = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return parse_request(fields, eos_token_ids=(2,), vocab_size=1000)


def test_content_of_a_tool_call_is_no_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert parse(chat_messages=json.dumps([call])).prompt == ChatRequest(({**call, "content": ""},))


def test_inputs_of_the_front_end_are_understood() -> None:
    request = parse(
        chat_messages='[{"role": "user", "content": "x"}]', chat_tools='[{"type": "function"}]',
        chat_template_kwargs='{"a": true}', logit_bias='{"5": -100}', top_log_probs=3, stop_token_ids=[7, 8],
        priority=2, deadline_s=1.5, cache_salt="me", include_stop_in_output=True,
        guided_decoding_guide_type="json_schema", guided_decoding_guide='{"type": "object"}',
    )  # fmt: skip
    assert request.prompt == ChatRequest(({"role": "user", "content": "x"},), ({"type": "function"},), (("a", True),))
    params = request.params
    assert (params.logit_bias, params.logprobs, params.stop_token_ids) == ({5: -100.0}, 3, (7, 8))
    assert params.include_stop_in_output
    assert params.structured_output is not None
    assert params.structured_output.kind == "json_schema"
    assert (request.priority, request.deadline_s, request.cache_salt) == (2, 1.5, "me")
    assert (request.log_probs, request.log_prob_details) == (False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_messages", "no json"),
        ("chat_messages", "[]"),
        ("chat_messages", "[" * 100_000),
        ("chat_messages", '["x"]'),
        ("chat_messages", '[{"role": "user"}]'),
        ("chat_messages", '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]'),
        ("chat_template_kwargs", '{"a": [1]}'),
        ("logit_bias", "[1]"),
        ("logit_bias", '{"x": 1}'),
        ("deadline_s", 0.0),
        ("guided_decoding_guide_type", "xml"),
    ],
)
def test_refusals_name_the_input(name: str, value: object) -> None:
    base: dict[str, object] = {} if name == "chat_messages" else {"chat_messages": '[{"role": "user", "content": "x"}]'}
    with pytest.raises(RequestError) as caught:
        parse(**{**base, name: value})
    assert caught.value.field == name

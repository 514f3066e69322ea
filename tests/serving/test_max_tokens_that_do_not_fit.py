"""A ``max_tokens`` beyond the sequence: cut with a word (Triton's tensors), refused (OpenAI's API)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtllm_dflash import LLM
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.chat_prompt import ChatTemplate
from trtllm_dflash.serving.engine_server import EngineServer
from trtllm_dflash.serving.gateway.api_errors import from_triton
from trtllm_dflash.serving.log_prob_details import TokenBytes
from trtllm_dflash.serving.request_fields import parse_request
from trtllm_dflash.serving.request_inputs import AS_MANY_AS_FIT

PROMPT = [5, 7] * 100  # of max_seq_len 256


@pytest.fixture
def proxy(tiny_engines: Callable[..., Path]) -> Iterator[wire.Connection]:
    """The proxy's end of a connection to a server around a real (tiny) engine."""
    ours, theirs = socket.socketpair()
    engines = tiny_engines("llama-v2")
    chat = ChatTemplate(engines / "tokenizer")
    with LLM(engines, device="cpu") as llm:
        server = EngineServer(
            llm,
            wire.Connection(theirs),
            limits=llm.limits,
            eos_token_ids=llm.session.target_config.eos_token_ids,
            vocab_size=llm.session.target_config.vocab_size,
            render_chat=chat.encode,
            token_bytes=TokenBytes(chat.tokenizer),
            info={},
            speculates=True,
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        connection = wire.Connection(ours)
        yield connection
        connection.close()
        thread.join(timeout=5)


def _end(proxy: wire.Connection, max_tokens: int, **more: object) -> wire.Delta | wire.Failed:
    inputs: dict[str, list[object]] = {name: [value] for name, value in more.items()}
    fields: dict[str, list[object]] = {
        "input_ids": list(PROMPT),
        "max_tokens": [max_tokens],
        "ignore_eos": [True],
        **inputs,
    }
    proxy.send(wire.Generate("1", fields))
    while (message := proxy.receive()) is not None:
        if isinstance(message, wire.Failed) or (isinstance(message, wire.Delta) and message.finish_reason):
            return message
    raise AssertionError("the connection ended first")


def test_a_cut_is_said_in_the_requests_metrics(proxy: wire.Connection) -> None:
    end = _end(proxy, 100)
    assert isinstance(end, wire.Delta)
    assert (end.finish_reason, end.metrics["completion_tokens"]) == ("length", 56)
    (warning,) = json.loads(json.dumps(end.metrics))["warnings"]
    assert warning.startswith("max_tokens: got 100, cut to 56")


@pytest.mark.parametrize("max_tokens", [56, AS_MANY_AS_FIT])
def test_what_fits_is_not_remarked_on(proxy: wire.Connection, max_tokens: int) -> None:
    end = _end(proxy, max_tokens)
    assert isinstance(end, wire.Delta)
    assert (end.finish_reason, end.metrics["completion_tokens"]) == ("length", 56)
    assert "warnings" not in end.metrics


def test_what_must_fit_is_refused_as_openai_does(proxy: wire.Connection) -> None:
    end = _end(proxy, 57, max_tokens_must_fit=True)
    assert isinstance(end, wire.Failed)
    error = from_triton(400, f"{end.code}: {end.message}")
    assert (error.status, error.param, error.code) == (400, "max_tokens", "context_length_exceeded")
    assert "got 57, expected at most 56: this model's maximum context length" in error.message


def test_a_prompt_that_is_too_long_has_the_same_code(proxy: wire.Connection) -> None:
    proxy.send(wire.Generate("2", {"input_ids": [5] * 256, "max_tokens": [1]}))
    while not isinstance(message := proxy.receive(), wire.Failed):
        assert message is not None
    error = from_triton(400, f"{message.code}: {message.message}")
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_as_many_as_fit_is_no_number() -> None:
    request = parse_request({"text_input": ["x"], "max_tokens": [AS_MANY_AS_FIT]}, eos_token_ids=(), vocab_size=9)
    assert request.params.max_tokens is None
    assert not request.max_tokens_must_fit

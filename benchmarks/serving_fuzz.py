"""Requests that are wrong in one way each, drawn from a seed: fields, sizes, encodings, HTTP itself."""

from __future__ import annotations

import http.client
import json
import random
import socket
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

Attack = Callable[[random.Random], "Request"]
Request = tuple[str, str, bytes, dict[str, str]]
JSON = {"content-type": "application/json"}
PATHS = ("/v1/chat/completions", "/v1/completions")


def malformed_requests(count: int, seed: int, model: str, max_seq_len: int) -> list[Request]:
    """``count`` requests (method, path, body, headers); each must be answered with a 4xx."""
    chance = random.Random(seed)
    attacks: list[Attack] = [
        lambda c: _with(c, model, {_name(c): _value(c)}),
        lambda c: _with(c, model, _wrong_type(c)),
        lambda c: _with(c, model, _out_of_range(c)),
        lambda c: _with(c, model, _unsupported(c)),
        lambda c: _without(c, model),
        lambda c: _cut(c, model),
        lambda c: _bytes(c, model),
        lambda c: _garbage(c),
        lambda c: _nested(c),
        lambda c: _with(c, model, {"model": _name(c)}),
        lambda c: _long_prompt(c, model, max_seq_len),
        lambda c: _huge(c, model),
        lambda c: (c.choice(("GET", "PUT", "DELETE", "PATCH")), c.choice(PATHS), b"", {}),
        lambda c: ("POST", f"/v1/{quote(_name(c))}", b"{}", JSON),
        lambda c: _message(c, model),
        lambda c: _form(c, model),
    ]
    return [attacks[index % len(attacks)](chance) for index in range(count)]


def send(host: str, port: int, request: Request) -> int:
    """The status of the answer; 0 when there was none."""
    method, path, body, headers = request
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def raw_garbage(host: str, port: int, seed: int) -> None:
    """Bytes that are no HTTP; whatever comes back, the server must go on."""
    with socket.create_connection((host, port), timeout=10) as stream:
        stream.sendall(random.Random(seed).randbytes(2000))
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(4096):
            pass


def _base(chance: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    path = chance.choice(PATHS)
    prompt: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    return path, {"model": model, "max_tokens": 4, "stream": chance.random() < 0.5, **prompt}


def _post(path: str, body: object) -> Request:
    return "POST", path, json.dumps(body).encode(), JSON


def _with(chance: random.Random, model: str, changes: dict[str, Any]) -> Request:
    path, body = _base(chance, model)
    return _post(path, {**body, **changes})


def _name(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase + "_é漢", k=chance.randint(6, 30))) + "_x"


def _value(chance: random.Random) -> Any:
    return chance.choice([1, -1, 1e300, "x", [], {}, True, "é" * 100, {"a": [{}]}])


def _wrong_type(chance: random.Random) -> dict[str, Any]:
    name = chance.choice(["max_tokens", "temperature", "top_p", "n", "seed", "stop", "logit_bias", "stream", "top_k"])
    return {name: chance.choice([{"a": 1}, [[1]], "text" if name not in ("stop",) else 5, [None], {"1": "x"}])}


def _out_of_range(chance: random.Random) -> dict[str, Any]:
    return chance.choice(
        [
            {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 2**40}, {"max_tokens": 1.5}, {"temperature": -1},
            {"temperature": 1e31}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": -1}, {"top_k": -1}, {"top_k": 2**33},
            {"min_p": 2}, {"n": 0}, {"n": 1000}, {"n": -1}, {"seed": 2**64}, {"seed": 0.5}, {"stop": ""},
            {"stop": ["x"] * 100}, {"presence_penalty": 3}, {"frequency_penalty": -9}, {"repetition_penalty": 0},
            {"logit_bias": {"5": 200}}, {"logit_bias": {"-5": 1}}, {"logit_bias": {"99999999": 1}},
            {"logit_bias": {"a": 1}}, {"min_tokens": 10}, {"min_tokens": -1}, {"stop_token_ids": [-1]},
            {"stop_token_ids": [10**8]}, {"deadline_s": 0}, {"deadline_s": -1}, {"priority": 2**40},
            {"priority": 1000}, {"bad_words": [""]}, {"cache_salt": ""},
        ]
    )  # fmt: skip


def _unsupported(chance: random.Random) -> dict[str, Any]:
    return chance.choice(
        [
            {"use_beam_search": True}, {"best_of": 7}, {"suffix": "x"}, {"store": True}, {"audio": {}},
            {"modalities": ["audio"]}, {"functions": [{"name": "f"}]}, {"tool_choice": "required"},
            {"reasoning_effort": "high"}, {"prompt_logprobs": 1}, {"service_tier": "flex"},
            {"stream_options": {"include_usage": 1}}, {"stream_options": {"x": True}}, {"length_penalty": 2},
        ]
    )  # fmt: skip


def _without(chance: random.Random, model: str) -> Request:
    path, body = _base(chance, model)
    del body[chance.choice([name for name in body if name in ("model", "prompt", "messages")])]
    return _post(path, body)


def _cut(chance: random.Random, model: str) -> Request:
    method, path, raw, headers = _post(*_base(chance, model))
    return method, path, raw[: chance.randint(0, len(raw) - 1)], headers


def _bytes(chance: random.Random, model: str) -> Request:
    method, path, raw, headers = _post(*_base(chance, model))
    encoded = chance.choice(
        [
            raw.replace(b"hello", b"\xff\xfe\x80"),
            raw.replace(b"hello", b"\\ud800"),
            raw.replace(b"hello", b"\x00"),
            raw.decode().encode("utf-16"),
            raw.replace(b"4", b"NaN"),
            raw.replace(b"4", b"Infinity"),
            raw.replace(b'"', b"'"),
            raw + b"}",
            raw.replace(b"{", b"\xef\xbb\xbf{", 1).replace(b"model", b"mo\xc3del"),
        ]
    )
    return method, path, encoded, headers


def _garbage(chance: random.Random) -> Request:
    kinds = [chance.randbytes(chance.randint(0, 3000)), b"null", b"[]", b"1", b'"x"', b"", b"{}", b"a=1&b=2"]
    headers = chance.choice([JSON, {}, {"content-type": "text/html; charset=utf-7"}, {"content-encoding": "gzip"}])
    return "POST", chance.choice(PATHS), chance.choice(kinds), headers


def _nested(chance: random.Random) -> Request:
    depth = chance.randint(100, 100_000)
    opening = chance.choice([b"[", b'{"a":'])
    body = b'{"model":"x","prompt":' + opening * depth
    return "POST", chance.choice(PATHS), body, JSON


def _long_prompt(chance: random.Random, model: str, max_seq_len: int) -> Request:
    words = max_seq_len + chance.randint(1, 3000)
    if chance.random() < 0.5:
        return _post("/v1/completions", {"model": model, "prompt": [5] * words, "max_tokens": 1})
    return _post("/v1/completions", {"model": model, "prompt": "a b " * words, "max_tokens": 1})


def _huge(chance: random.Random, model: str) -> Request:
    path, body = _base(chance, model)
    body["prompt" if "prompt" in body else "user"] = "x" * chance.randint(1_100_000, 6_000_000)
    return _post(path, body)


def _message(chance: random.Random, model: str) -> Request:
    message = chance.choice(
        [
            {}, {"role": "user", "content": 5}, {"role": "god", "content": "x"}, {"content": "x"}, "hi", None, 5,
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": "x", "extra": 1},
            {"role": "tool", "content": {"a": 1}}, {"role": "user", "content": ["x"]},
        ]
    )  # fmt: skip
    messages = chance.choice([[message], [{"role": "user", "content": "x"}, message], {"role": "user"}, [], "hi"])
    return _post(PATHS[0], {"model": model, "messages": messages, "max_tokens": 2})


def _form(chance: random.Random, model: str) -> Request:
    form = chance.choice(
        [
            {"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "json", 5,
            {"type": "json_schema", "json_schema": {"schema": {"type": "no-such-type"}}},
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
            {"type": "json_object", "json_schema": {"schema": {}}},
        ]
    )  # fmt: skip
    path, body = _base(chance, model)
    return _post(path, {**body, "response_format": form})

"""The LLM facade: prompts of every kind, streaming, wrong input, and what it says of itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import BOS, VOCAB_SIZE

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine.build import build
from trtllm_dflash.errors import ConfigError, QueueFullError, RequestError
from trtllm_dflash.runtime.outputs import OutputChunk
from trtllm_dflash.runtime.slots import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, frequency_penalty=0.4)
TEXT = {"type": "text", "text": "ab"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


def test_text_ids_and_chat_messages_are_the_same_prompt(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    assert llm.has_chat_template
    chat = [{"role": "user", "content": "abc"}]
    # The template writes its own special tokens: no BOS is added in front of them.
    ids = llm.encode("<|user|>abc\n<|assistant|>\n")[1:]
    assert llm.encode(chat) == ids
    assert BOS not in ids
    outputs = llm.generate([chat, list(ids)], GREEDY)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert [output.index for output in outputs] == [0, 1]


def test_parts_of_text_are_one_text(tiny_llms: Callable) -> None:
    """A template sees strings only: it would print a list as Python does, or leave it out."""
    llm = tiny_llms("llama-v2")
    parts = [TEXT, {"type": "text", "text": "c"}]
    assert llm.encode([{"role": "user", "content": parts}]) == llm.encode([{"role": "user", "content": "abc"}])


def test_one_prompt_or_several(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    single = llm.generate("abc", GREEDY)
    assert len(single) == 1
    assert [o.text for o in llm.generate(["abc", "abc"], [GREEDY, GREEDY])] == [single[0].text] * 2
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "field", "found", "allowed"),
    [
        ([[]], "prompt", "[]", "at least one token"),
        ([VOCAB_SIZE], "prompt", str(VOCAB_SIZE), f"from 0 to {VOCAB_SIZE - 1}"),
        ([3, -1], "prompt", "-1", f"from 0 to {VOCAB_SIZE - 1}"),
        ([3, 4.0], "prompt", "4.0", f"from 0 to {VOCAB_SIZE - 1}"),
        ([True, 4], "prompt", "True", f"from 0 to {VOCAB_SIZE - 1}"),
        ([{"role": "user"}], "prompt", "role", "content"),
        ([{"role": "user", "content": 5}], "prompt", "content 5", "text"),
        ([{"role": "user", "content": None}], "prompt", "content None", "text"),
        ([{"role": 1, "content": "x"}], "prompt", "1", "role"),
        ([{"role": "user", "content": [TEXT, IMAGE]}], "prompt", "type 'image_url'", "images"),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt", "text None", "a string"),
        ([{"role": "user", "content": ["x"]}], "prompt", "'x'", "parts of type 'text'"),
        (5, "prompt", "5", "text"),
        (None, "prompt", "None", "text"),
        ([None], "prompt", "None", "text"),
    ],
    ids=str,
)
def test_wrong_prompts(tiny_llms: Callable, prompt: Any, field: str, found: str, allowed: str) -> None:
    llm = tiny_llms("llama-v2")
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.field == field
    assert found in str(caught.value)
    assert allowed in str(caught.value)
    assert llm.generate("abc", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("values", "field", "allowed"),
    [
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids", f"0 to {VOCAB_SIZE - 1}"),
        ({"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))}, "stop_token_ids", f"at most {MAX_STOP_IDS}"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", f"0 to {VOCAB_SIZE - 1}"),
        ({"bad_words": tuple(f"w{n}" for n in range(MAX_BAD_WORDS))}, "bad_words", f"at most {MAX_BAD_WORDS}"),
        ({"bad_words": ("x" * 40,)}, "bad_words", f"at most {MAX_BAD_WORD_TOKENS}"),
        ({"logprobs": VOCAB_SIZE + 1}, "logprobs", f"{VOCAB_SIZE}"),
        ({"temperature": -1.0}, "temperature", "0"),
        ({"temperature": float("nan")}, "temperature", "0"),
        ({"top_k": -1}, "top_k", "0"),
        ({"top_p": 0.0}, "top_p", "1"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"min_p": 1.5}, "min_p", "1"),
        ({"seed": 2**64}, "seed", "0"),
    ],
    ids=str,
)
def test_wrong_parameters(tiny_llms: Callable, values: dict[str, Any], field: str, allowed: str) -> None:
    """Refused with field, value and range before anything runs; the next request is served."""
    llm = tiny_llms("llama-v2")
    before = llm.stats().counters
    with pytest.raises(RequestError) as caught:
        llm.generate(["abc", "abc"], [GREEDY, SamplingParams(**values)])
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert llm.stats().counters == before


def test_an_empty_prompt_has_no_token(tiny_llms: Callable) -> None:
    with pytest.raises(RequestError, match=r"prompt: got \[\], expected at least one token"):
        tiny_llms("llama-v2").submit([], GREEDY, lambda chunk: None)


@pytest.mark.parametrize("prompt", ["a \udcff", [{"role": "user", "content": "a \ud800 b"}]], ids=["text", "chat"])
def test_halves_of_characters_are_refused(tiny_llms: Callable, prompt: Any) -> None:
    """What a terminal makes of bytes that are no UTF-8."""
    with pytest.raises(RequestError, match="without halves of surrogate pairs") as caught:
        tiny_llms("llama-v2").generate([prompt], GREEDY)
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match="bad_words: got"):
        tiny_llms("llama-v2").generate("a", replace(GREEDY, bad_words=("\udcff",)))


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_prompts_of_one_call_start_together(tiny_llms: Callable, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """However slowly they are queued: the engine looks when all are there."""
    llm = tiny_llms("llama-v2")
    insert, prefill, groups = llm._engine._scheduler._insert, llm._engine._prefill, []
    if busy:
        started = threading.Event()
        other = llm.submit("abc", replace(GREEDY, max_tokens=200, ignore_eos=True), lambda chunk: started.set())
        assert started.wait(10)

    def slowly(request: Any) -> None:
        time.sleep(0.05)
        insert(request)

    def counted(requests: Any, decoding: int) -> Any:
        groups.append(len(requests))
        return prefill(requests, decoding)

    monkeypatch.setattr(llm._engine._scheduler, "_insert", slowly)
    monkeypatch.setattr(llm._engine, "_prefill", counted)
    llm.generate(["a", "b", "c"], GREEDY)
    assert next(count for count in groups if count) == 3
    if busy:
        llm.cancel(other)


def test_a_call_is_queued_whole_or_not_at_all(tiny_engines: Callable) -> None:
    with LLM(tiny_engines("llama-v2", max_batch_size=2), device="cpu", max_queue=1) as llm:
        with pytest.raises(QueueFullError, match="got 1 waiting requests, expected fewer than max_queue=1"):
            llm.generate(["a", "b", "c", "d"], GREEDY)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.counters["requests_refused"]) == (0, 0, 4)
        assert len(llm.generate(["a", "b", "c"], GREEDY)) == 3


def test_one_parameter_set_per_prompt(tiny_llms: Callable) -> None:
    with pytest.raises(RequestError, match="params: got '2 sampling parameters', expected one, or one per prompt"):
        tiny_llms("llama-v2").generate(["abc"] * 3, [GREEDY] * 2)


def test_a_request_that_the_cache_can_never_hold(tiny_engines: Callable) -> None:
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=64) as llm:
        with pytest.raises(RequestError, match=r"max_tokens: got 60, expected .* within the KV cache of 64 tokens"):
            llm.generate("a" * 20, replace(GREEDY, max_tokens=60))
        assert llm.generate("a" * 20, replace(GREEDY, max_tokens=30))[0].finish_reason == "length"


def test_as_many_as_fit_is_what_the_cache_holds_where_that_is_less(tiny_engines: Callable) -> None:
    """A chat without a max_tokens asks for this: it must not be refused because of a number that nobody gave."""
    unlimited = replace(GREEDY, max_tokens=None, ignore_eos=True)
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=64) as llm:
        assert llm.max_request_tokens == 64
        output = llm.generate("a" * 20, unlimited)[0]
        assert (output.finish_reason, output.warnings) == ("length", ())
        assert output.metrics.prompt_tokens + len(output.token_ids) == 64
        fits = 64 - output.metrics.prompt_tokens
        ask = {"on_chunk": lambda chunk: None, "max_tokens_must_fit": True}
        with pytest.raises(
            RequestError, match=rf"max_tokens: got {fits + 1}, expected at most {fits}: .* its KV cache"
        ):
            llm.submit("a" * 20, replace(GREEDY, max_tokens=fits + 1), **ask)
        with pytest.raises(RequestError, match="prompt: got '64 tokens', expected at most the KV cache - 1 = 63"):
            llm.generate([[5] * 64], unlimited)
        with pytest.raises(RequestError, match="max_tokens: got 5000, expected"):
            llm.generate("a" * 20, replace(GREEDY, max_tokens=5000))


def test_request_ids_are_unique_while_in_use(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    llm.submit("abc", replace(GREEDY, max_tokens=200), lambda chunk: None, request_id="mine")
    with pytest.raises(RequestError, match="request_id: got 'mine'"):
        llm.submit("abc", GREEDY, lambda chunk: None, request_id="mine")
    llm.cancel("mine")
    llm.cancel("never existed")
    llm.generate("abc", GREEDY)


def test_stream_gives_text_and_then_the_final_chunk(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    expected = llm.generate("abc", GREEDY)[0]

    async def collect() -> list[OutputChunk]:
        return [chunk async for chunk in llm.stream("abc", GREEDY)]

    chunks = asyncio.run(collect())
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids
    assert len(chunks) > 3
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].metrics is not None
    assert chunks[-1].metrics.accepted_histogram == expected.metrics.accepted_histogram


def test_many_streams_at_once(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    expected = [o.text for o in llm.generate([f"{n} abc" for n in range(12)], GREEDY)]

    async def text(prompt: str) -> str:
        return "".join([chunk.text async for chunk in llm.stream(prompt, GREEDY)])

    async def everything() -> list[str]:
        return await asyncio.gather(*[text(f"{n} abc") for n in range(12)])

    assert asyncio.run(everything()) == expected


def test_leaving_a_stream_cancels_its_request(tiny_engines: Callable) -> None:
    async def leave(llm: LLM) -> None:
        async for chunk in llm.stream("abc", replace(GREEDY, max_tokens=250)):
            if chunk.token_ids:
                break

    async def run(llm: LLM) -> None:
        await leave(llm)
        for _ in range(500):
            if llm.stats().running == 0:
                return
            await asyncio.sleep(0.01)

    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        asyncio.run(run(llm))
        assert llm.stats().counters["requests_cancelled"] == 1
        assert llm.stats().pages_used == 0


def test_metrics_of_plain_decoding(tiny_llms: Callable) -> None:
    output = tiny_llms("llama-v2", speculation="off").generate("abc", GREEDY)[0]
    metrics = output.metrics
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.cycles) == (4, 30, 29)
    assert (metrics.drafted_tokens, metrics.accepted_tokens, metrics.accepted_histogram) == (0, 0, (29,))
    assert metrics.acceptance_length == 1.0
    assert 0 <= metrics.queue_s <= metrics.time_to_first_token_s <= metrics.elapsed_s


def test_one_token_has_no_acceptance_length(tiny_llms: Callable) -> None:
    metrics = tiny_llms("llama-v2").generate("abc", replace(GREEDY, max_tokens=1))[0].metrics
    assert (metrics.cycles, metrics.acceptance_length) == (0, None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"speculation": "maybe"}, RequestError, "speculation: got 'maybe', expected auto, on or off"),
        ({"block_size": 7}, RequestError, "block_size: got 7, expected 1 to the engine's block size 6"),
        ({"block_size": 0}, RequestError, "block_size: got 0"),
        ({"block_size": 2, "speculation": "off"}, RequestError, "block_size: got 2, expected 1 or none: speculation"),
        ({"device": "tpu"}, ConfigError, "device 'tpu': expected cpu or cuda:N"),
        ({"device": "meta"}, ConfigError, "device 'meta': expected cpu or cuda:N"),
        ({"kv_cache_tokens": 31}, ConfigError, "kv_cache_tokens is 31, expected at least one page of 32 tokens"),
        ({"kv_cache_tokens": 10**15}, ConfigError, r"kv_cache_tokens is 1000000000000000, which take \d+ MiB; \d+ MiB"),
    ],
    ids=str,
)
def test_wrong_arguments(tiny_engines: Callable, arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_engines("llama-v2"), **arguments)


def test_speculation_without_a_drafter_is_refused(tiny_pairs: Callable, tmp_path: Path) -> None:
    """Who asks for speculation never gets plain decoding in silence."""
    convert(str(tiny_pairs("llama-v2").target), None, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engines", backend="torch", max_seq_len=64)
    for arguments, message in (({"speculation": "on"}, "has no drafter"), ({"block_size": 4}, "has no drafter")):
        with pytest.raises((ConfigError, RequestError), match=message):
            LLM(tmp_path / "engines", device="cpu", **arguments)
    with LLM(tmp_path / "engines", device="cpu") as llm:
        assert llm.block_size == 1


def test_wrong_directory(tiny_checkpoints: Callable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r'kind.*found.*checkpoint.*expected "engine"'):
        LLM(tiny_checkpoints("llama-v2"))

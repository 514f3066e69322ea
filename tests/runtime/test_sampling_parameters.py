"""Every sampling parameter under speculation: greedy text against plain decoding written out, and seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_decoding import greedy, token_logprobs
from tiny_pair import ACTIVE, EOS, byte_id

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

LENGTH = 32
# They end in likely tokens.
PROMPTS = ("hello d", "a b c", "日本é")
BASE = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
A, B, SPACE = byte_id(ord("a")), byte_id(ord("b")), byte_id(ord(" "))

PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 2.0},
    "presence negative": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.4},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {A: -4.0, ACTIVE[7]: 3.0}},
    "ban": {"logit_bias": {A: -100.0}},
    "bias and penalties": {"logit_bias": {B: 5.0}, "frequency_penalty": 0.9},
    "bad words": {"bad_words": ("a", "cb", "the", "d \n")},
    "bad words and penalties": {"bad_words": ("ba", "th"), "repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 13, "ignore_eos": False, "logit_bias": {EOS: 6.0}},
    "stop ids": {"stop_token_ids": (ACTIVE[5], 299 - 40), "frequency_penalty": 1.0},
    "min_tokens with stop ids": {"min_tokens": 17, "stop_token_ids": (A, B), "presence_penalty": 1.0},
}


def _stop_ids(params: SamplingParams) -> tuple[int, ...]:
    return (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids)


def _bad_words(llm: LLM, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Each word as it is tokenised at the start of text and after a space; BOS is not part of it."""
    return [llm.encode(text)[1:] for word in words for text in (word, " " + word.lstrip())]


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_greedy_under_parameter(tiny_pairs: Callable, tiny_llms: Callable, name: str, case: str) -> None:
    llm, plain, model = tiny_llms(name), tiny_llms(name, speculation="off"), tiny_pairs(name).model
    params = replace(BASE, **PARAMETERS[case])
    expected = [
        greedy(
            model,
            llm.encode(prompt),
            params,
            max_tokens=LENGTH,
            stop_ids=_stop_ids(params),
            bad_words=_bad_words(llm, params.bad_words),
        )
        for prompt in PROMPTS
    ]
    assert [list(output.token_ids) for output in plain.generate(list(PROMPTS), params)] == expected
    assert [list(output.token_ids) for output in llm.generate(list(PROMPTS), params)] == expected
    without = [list(output.token_ids) for output in llm.generate(list(PROMPTS), BASE)]
    assert without != expected, "the parameter must change something"


def test_requests_of_one_batch_keep_their_own_parameters(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    each = [replace(BASE, **values) for values in PARAMETERS.values()]
    together = llm.generate(["hello d"] * len(each), each)
    alone = [llm.generate("hello d", params)[0] for params in each]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_sampled_requests_of_one_batch_keep_their_own_parameters(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    filters: list[dict[str, Any]] = [
        {"top_k": 2},
        {"top_k": 9, "top_p": 0.7},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 5, "min_p": 0.05},
    ]
    base = SamplingParams(temperature=1.2, max_tokens=LENGTH, ignore_eos=True, seed=9)
    each = [replace(base, **values) for values in filters]
    alone = [llm.generate("hello d", params)[0].token_ids for params in each]
    assert len(set(alone)) == len(alone)
    # All together, those with a top-k, and each beside one of another kind.
    groups = [list(range(7)), [0, 1, 6], [0, 5], [1, 4], [2, 5], [3, 6]]
    for group in groups:
        outputs = llm.generate(["hello d"] * len(group), [each[index] for index in group])
        assert [output.token_ids for output in outputs] == [alone[index] for index in group]


def test_bad_words_never_appear_in_sampled_output(tiny_llms: Callable) -> None:
    """As token sequences, also across the ends of blocks."""
    llm = tiny_llms("llama-v2")
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, bad_words=("ba", "cca", "a c", "e"))
    banned = _bad_words(llm, params.bad_words)
    assert {len(word) for word in banned} >= {1, 2, 3}
    outputs = llm.generate(["abc"] * 48, [replace(params, seed=seed) for seed in range(48)])
    for output in outputs:
        sequence = (*llm.encode("abc"), *output.token_ids)
        found = {sequence[n : n + len(word)] for word in banned for n in range(3, len(sequence))} & set(banned)
        assert not found


@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_seed_decides_alone_or_in_a_batch_or_later(tiny_llms: Callable, name: str) -> None:
    llm = tiny_llms(name)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=42)
    alone = llm.generate("hello d", params)[0].token_ids
    others = [replace(params, seed=seed) for seed in range(7)]
    batch = llm.generate([*(f"other {n}" for n in range(7)), "hello d"], [*others, params])
    llm.generate(["x"] * 30, replace(params, seed=None, max_tokens=9))
    assert batch[-1].token_ids == alone
    assert llm.generate("hello d", params)[0].token_ids == alone
    assert llm.generate("hello d", replace(params, seed=43))[0].token_ids != alone


def test_seed_decides_with_a_neighbour_cancelled(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=42)
    alone = llm.generate("hello d", params)[0].token_ids
    tokens: list[int] = []
    done = threading.Event()

    def collect(chunk: OutputChunk) -> None:
        tokens.extend(chunk.token_ids)
        if len(tokens) > 8:
            llm.cancel(neighbour)
        if chunk.finish_reason is not None:
            done.set()

    neighbour = llm.submit("neighbour", replace(params, max_tokens=200, seed=1), lambda chunk: None)
    llm.submit("hello d", params, collect)
    assert done.wait(30)
    assert tuple(tokens) == alone


def test_no_seed_draws_a_new_one(tiny_llms: Callable) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
    outputs = tiny_llms("llama-v2").generate(["hello d"] * 4, [params, params, replace(params, seed=1), params])
    assert len({output.token_ids for output in outputs}) == 4


def test_largest_seed(tiny_llms: Callable) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=2**64 - 1)
    one, other = tiny_llms("llama-v2").generate(["hello d"] * 2, params)
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_logprobs_are_the_targets(tiny_pairs: Callable, tiny_llms: Callable, name: str, temperature: float) -> None:
    """Of the raw target, one per emitted token, whatever else the parameters do."""
    llm = tiny_llms(name)
    params = SamplingParams(
        temperature=temperature, max_tokens=30, ignore_eos=True, logprobs=4, seed=5, top_k=8, frequency_penalty=0.3
    )
    for output in llm.generate(list(PROMPTS), params):
        prompt = llm.encode(PROMPTS[output.index])
        expected = token_logprobs(tiny_pairs(name).model, prompt, output.token_ids)
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        for row, entry in zip(expected, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            best = torch.topk(row, 4).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)
            for token, value in entry.top:
                assert value == pytest.approx(float(row[token]), abs=1e-4)


def test_logprobs_stop_where_the_tokens_stop(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    whole = llm.generate("hello d", replace(BASE, frequency_penalty=0.4))[0]
    stop = whole.text[20:22]
    params = replace(BASE, frequency_penalty=0.4, logprobs=0, stop=(stop,))
    cut, plain = llm.generate(["hello d"] * 2, [params, replace(params, logprobs=None)])
    assert cut.logprobs is not None
    assert 0 < len(cut.logprobs) == len(cut.token_ids) < LENGTH
    assert all(entry.top == () for entry in cut.logprobs)
    assert plain.logprobs is None


def test_requests_of_one_batch_keep_their_own_number_of_alternatives(tiny_llms: Callable) -> None:
    """They are computed together, as many as the neighbour with the most asked for."""
    wanted = (5, 1, None, 0, 3)
    outputs = tiny_llms("llama-v2").generate(["hello d"] * 5, [replace(BASE, logprobs=count) for count in wanted])
    assert outputs[2].logprobs is None
    whole = outputs[0].logprobs
    assert whole is not None
    for count, output in zip(wanted, outputs, strict=True):
        if count is not None:
            assert output.logprobs == tuple(replace(entry, top=entry.top[:count]) for entry in whole)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 2**70},
        {"min_tokens": 2**70, "max_tokens": None},
        {"temperature": 1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
    ],
    ids=str,
)
def test_values_beyond_the_tensors_range_are_harmless(tiny_llms: Callable, values: dict[str, Any]) -> None:
    llm = tiny_llms("llama-v2")
    params = replace(SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=1), **values)
    expected = llm.generate("hello d", replace(BASE, max_tokens=10))[0].token_ids
    neighbour, output = llm.generate(["hello d"] * 2, [replace(BASE, max_tokens=10), params])
    assert output.finish_reason == "length"
    assert neighbour.token_ids == expected


def test_a_temperature_next_to_zero_is_greedy(tiny_llms: Callable) -> None:
    """Dividing by it would overflow."""
    llm = tiny_llms("llama-v2")
    greedy_text = llm.generate("hello d", BASE)[0].token_ids
    assert llm.generate("hello d", replace(BASE, temperature=1e-38, seed=3))[0].token_ids == greedy_text


def test_a_low_temperature_is_nearly_greedy(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    greedy_text = llm.generate("hello d", BASE)[0].token_ids
    assert llm.generate("hello d", replace(BASE, temperature=2e-3, seed=3))[0].token_ids == greedy_text

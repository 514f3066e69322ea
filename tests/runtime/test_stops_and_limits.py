"""Stops and limits may fall anywhere inside a committed block: exactly the tokens before the cut are emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_pair import ACTIVE, EOS, byte_id
from transformers import PreTrainedTokenizerBase

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.outputs import RequestOutput

# A penalty makes the greedy text varied; it repeats itself otherwise.
BASE = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, frequency_penalty=0.4)


def _check_counters(output: RequestOutput, block_size: int) -> None:
    metrics = output.metrics
    assert metrics.completion_tokens == len(output.token_ids)
    assert len(metrics.accepted_histogram) == block_size
    assert sum(metrics.accepted_histogram) == metrics.cycles
    # Every cycle emits its kept drafts and one more; the first token comes from the prefill.
    committed = sum((kept + 1) * count for kept, count in enumerate(metrics.accepted_histogram))
    assert committed == metrics.completion_tokens - 1
    assert metrics.accepted_tokens <= metrics.drafted_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_exactly_max_tokens(tiny_llms: Callable, name: str, max_tokens: int) -> None:
    llm = tiny_llms(name)
    whole = llm.generate("hello d", BASE)[0]
    # Alone, and beside a longer request whose blocks are wider.
    for neighbours in (0, 3):
        each = [replace(BASE, max_tokens=max_tokens), *[BASE] * neighbours]
        output = llm.generate(["hello d", *["other"] * neighbours], each)[0]
        assert output.token_ids == whole.token_ids[:max_tokens]
        assert output.finish_reason == "length"
        _check_counters(output, llm.block_size)


@pytest.mark.parametrize("extra", [1, 2, 5, 6, 7, 12, 13])
def test_prompts_that_nearly_fill_max_seq_len(tiny_llms: Callable, extra: int) -> None:
    """Room for fewer tokens than a block or its reserve neither refuses nor crashes a request."""
    llm, plain = tiny_llms("llama-v2"), tiny_llms("llama-v2", speculation="off")
    prompt = [ACTIVE[n % 16] for n in range(llm.limits.max_seq_len - extra)]
    params = replace(BASE, max_tokens=None)
    output = llm.generate(prompt, params)[0]
    assert len(output.token_ids) == extra
    assert output.finish_reason == "length"
    assert output.token_ids == plain.generate(prompt, params)[0].token_ids
    _check_counters(output, llm.block_size)


@pytest.mark.parametrize("excess", [0, 1])
def test_prompts_that_leave_no_room(tiny_llms: Callable, excess: int) -> None:
    llm = tiny_llms("llama-v2")
    limit = llm.limits.max_seq_len
    with pytest.raises(RequestError, match=f"prompt: got '{limit + excess} tokens', expected at most .* {limit - 1}"):
        llm.generate([ACTIVE[1]] * (limit + excess), BASE)


def test_max_tokens_beyond_max_seq_len_ends_there(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    output = llm.generate([ACTIVE[1]] * 200, replace(BASE, max_tokens=1000))[0]
    assert len(output.token_ids) == llm.limits.max_seq_len - 200
    assert output.finish_reason == "length"
    (warning,) = output.warnings
    assert warning.startswith(
        "max_tokens: got 1000, cut to 56: the sequence is full (max_seq_len 256, of which the prompt"
    )


def test_a_max_tokens_of_thousands_of_digits_is_cut_like_any_other(tiny_llms: Callable) -> None:
    output = tiny_llms("llama-v2").generate([ACTIVE[1]] * 250, replace(BASE, max_tokens=10**5000))[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert output.warnings[0].startswith("max_tokens: got a number of thousands of digits, cut to 6")


def test_only_an_output_that_was_cut_says_so(tiny_llms: Callable) -> None:
    """Neither a max_tokens that fits, nor as many as fit, nor one that did not fit but was not reached either."""
    llm = tiny_llms("llama-v2")
    prompt = [ACTIVE[1]] * 200
    whole = llm.generate(prompt, replace(BASE, max_tokens=None))[0]
    ended = replace(BASE, max_tokens=1000, stop_token_ids=(whole.token_ids[9],))
    outputs = llm.generate([prompt] * 3, [replace(BASE, max_tokens=56), replace(BASE, max_tokens=None), ended])
    assert [len(output.token_ids) for output in outputs[:2]] == [56, 56]
    assert outputs[2].finish_reason == "stop"
    assert [output.warnings for output in outputs] == [(), (), ()]


def test_a_max_tokens_that_must_fit_is_refused(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    before = llm.stats()
    with pytest.raises(RequestError, match=r"max_tokens: got 57, expected at most 56: .* is 256 tokens .* has 200"):
        llm.submit([ACTIVE[1]] * 200, replace(BASE, max_tokens=57), lambda chunk: None, max_tokens_must_fit=True)
    assert llm.stats() == before


def test_stop_id_at_every_place_of_a_block(tiny_llms: Callable) -> None:
    """Each token of the greedy output in turn is the stop id: the output ends at its first appearance."""
    llm = tiny_llms("llama-v2")
    whole = llm.generate("hello d", BASE)[0].token_ids
    tokens = sorted(set(whole), key=whole.index)
    outputs = llm.generate(["hello d"] * len(tokens), [replace(BASE, stop_token_ids=(token,)) for token in tokens])
    assert len(tokens) > 8
    for token, output in zip(tokens, outputs, strict=True):
        assert output.token_ids == whole[: whole.index(token) + 1]
        assert output.finish_reason == "stop"
        _check_counters(output, llm.block_size)


def test_eos_ends_and_ignore_eos_does_not(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    biased = replace(BASE, logit_bias={EOS: 2.5})
    whole = llm.generate("hello d", biased)[0]
    assert EOS in whole.token_ids
    assert len(whole.token_ids) == 100
    cut = llm.generate("hello d", replace(biased, ignore_eos=False))[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(EOS) + 1]
    assert cut.finish_reason == "stop"


def test_stop_at_the_last_allowed_token_is_a_stop(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    whole = llm.generate("hello d", BASE)[0].token_ids
    last = next(n for n in range(9, 100) if whole[n] not in whole[:n])
    output = llm.generate("hello d", replace(BASE, max_tokens=last + 1, stop_token_ids=(whole[last],)))[0]
    assert (len(output.token_ids), output.finish_reason) == (last + 1, "stop")


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_at_every_place(
    tiny_llms: Callable, tiny_tokenizer: PreTrainedTokenizerBase, include: bool
) -> None:
    """Strings of one and two characters, inside tokens and across them: text ends at (or after) the first match."""
    llm = tiny_llms("llama-v2")
    whole = llm.generate("hello d", BASE)[0]
    stops = sorted({whole.text[n : n + length] for n in range(60) for length in (1, 2)})
    stops = [stop for stop in stops if "\ufffd" not in stop]
    each = [replace(BASE, stop=(stop,), include_stop_in_output=include) for stop in stops]
    assert len(stops) > 15
    for stop, output in zip(stops, llm.generate(["hello d"] * len(stops), each), strict=True):
        end = whole.text.index(stop) + (len(stop) if include else 0)
        assert output.text == whole.text[:end], stop
        assert output.finish_reason == "stop"
        # The tokens are those up to the one that completed the match.
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert stop in tiny_tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert stop not in tiny_tokenizer.decode(output.token_ids[:-1], skip_special_tokens=True)
        _check_counters(output, llm.block_size)


def test_earliest_of_several_stop_strings(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    whole = llm.generate("hello d", BASE)[0].text
    stops = (whole[31:33], whole[12:14], whole[22:24])
    output = llm.generate("hello d", replace(BASE, stop=stops))[0]
    assert output.text == whole[: min(whole.index(stop) for stop in stops)]


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_in_the_text_on_request(tiny_llms: Callable, include: bool) -> None:
    llm = tiny_llms("llama-v2")
    stop = byte_id(ord("c"))
    params = replace(BASE, stop_token_ids=(stop,), include_stop_in_output=include)
    output = llm.generate("hello d", params)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == stop
    assert output.text.endswith("c") == include
    assert output.text.count("c") == int(include)


def test_special_stop_token_in_the_text_on_request(tiny_llms: Callable) -> None:
    params = replace(BASE, ignore_eos=False, logit_bias={EOS: 2.5})
    without, within = tiny_llms("llama-v2").generate(
        ["hello d"] * 2, [params, replace(params, include_stop_in_output=True)]
    )
    assert within.text == without.text + "</s>"

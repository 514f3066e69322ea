"""Cancellation at any moment, churn for thousands of cycles, and threads: nothing leaks, nobody else notices."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from collected_streams import Streams
from tiny_pair import ACTIVE, byte_id

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.4)


def _idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_a_thousand_random_cancels(tiny_engines: Callable) -> None:
    """Pages are scarce and re-used at once, with a cycle of the victim in flight; who is not cancelled gets the text it
    gets alone."""
    draw = random.Random(7)
    prompts = [[draw.choice(ACTIVE) for _ in range(draw.randrange(1, 60))] for _ in range(12)]
    lengths = [draw.randrange(5, 50) for _ in prompts]
    options = EngineOptions(overlap=True)
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=32 * 24, options=options) as llm:
        alone = [
            llm.generate(prompt, replace(GREEDY, max_tokens=length))[0]
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        streams, cancelled, kept = Streams(), [], {}
        pace = threading.Event()
        for number in range(1300):
            which = draw.randrange(12)
            # Of some the log probabilities are asked for: they too end where the tokens end.
            params = replace(GREEDY, max_tokens=lengths[which], logprobs=None if number % 3 else 5)
            request_id = llm.submit(prompts[which], params, streams.add, request_id=f"r{number}")
            if number % 13:
                cancelled.append(request_id)
            else:
                kept[request_id] = which
            # Victims are cancelled while queued, prefilling, decoding, or already finished.
            while len(cancelled) > draw.randrange(40):
                llm.cancel(cancelled.pop(draw.randrange(len(cancelled))))
            if not number % 5:
                pace.wait(draw.random() * 0.01)
        for request_id in cancelled:
            llm.cancel(request_id)
        streams.wait(1300)
        for request_id, which in kept.items():
            assert streams.tokens[request_id] == alone[which].token_ids
            assert streams.text[request_id] == alone[which].text
        reasons = [chunk.finish_reason for chunk in streams.last.values()]
        assert reasons.count("cancelled") > 600
        assert set(reasons) == {"cancelled", "length"}
        # A cancelled request has the beginning of what it would have had.
        for request_id, chunk in streams.last.items():
            assert chunk.metrics is not None
            tokens = streams.tokens[request_id]
            assert chunk.metrics.completion_tokens == len(tokens)
            entries = streams.logprobs[request_id]
            assert tuple(entry.token_id for entry in entries) == (() if int(request_id[1:]) % 3 else tokens)
            assert all(len(entry.top) == 5 for entry in entries)
        assert _idle(llm)
        assert llm.stats().counters["requests_cancelled"] == reasons.count("cancelled")


def test_thousands_of_short_requests_leave_pages_constant(tiny_engines: Callable) -> None:
    draw = random.Random(8)
    params = [
        SamplingParams(temperature=draw.choice([0.0, 1.0]), max_tokens=draw.randrange(1, 9), seed=seed)
        for seed in range(2000)
    ]
    prompts = [[draw.choice(ACTIVE) for _ in range(draw.randrange(1, 40))] for _ in params]
    with LLM(tiny_engines("qwen3-v1", max_batch_size=64), device="cpu") as llm:
        outputs = llm.generate(prompts, params)
        assert _idle(llm)
        counters = llm.stats().counters
        assert counters["requests_finished"] == 2000
        assert counters["output_tokens"] == sum(len(output.token_ids) for output in outputs)
        assert counters["accepted_tokens"] == sum(output.metrics.accepted_tokens for output in outputs)
        assert counters["cycles"] == sum(output.metrics.cycles for output in outputs)
        assert counters["cycles"] > 2000
        again = llm.generate(prompts[::100], params[::100])
        assert [o.token_ids for o in again] == [o.token_ids for o in outputs[::100]]


def test_slot_is_clean_for_its_next_owner(tiny_engines: Callable) -> None:
    """One slot, three requests after another: long and penalised, short, long; the same as in fresh processes."""
    engines = tiny_engines("llama-v2", max_batch_size=1)
    loud = replace(
        GREEDY,
        max_tokens=150,
        temperature=1.0,
        seed=3,
        logit_bias={ACTIVE[1]: 4.0},
        bad_words=("c",),
        stop_token_ids=(ACTIVE[9],),
        min_tokens=150,
        repetition_penalty=1.5,
    )
    c = byte_id(ord("c"))
    # Reads everything that the first one may have left: counts, tokens seen, bias, stop ids, bad words, history.
    quiet = replace(GREEDY, repetition_penalty=1.3, logit_bias={ACTIVE[9]: 3.0, c: 3.0}, bad_words=("zz",))
    with LLM(engines, device="cpu") as llm:
        llm.generate([ACTIVE[n % 12] for n in range(90)], loud)
        used = [llm.generate(prompt, quiet)[0] for prompt in ("ab", "a b c d e" * 8)]
    for prompt, output in zip(("ab", "a b c d e" * 8), used, strict=True):
        with LLM(engines, device="cpu") as fresh:
            assert fresh.generate(prompt, quiet)[0].token_ids == output.token_ids
        assert {ACTIVE[9], c} <= set(output.token_ids)


@pytest.mark.parametrize(
    "loud", [{"logit_bias": {byte_id(ord("a")): -100.0}}, {"bad_words": ("a",)}], ids=["bias", "bad words"]
)
def test_what_a_slot_was_asked_before_does_not_come_back_with_a_neighbour(
    tiny_engines: Callable, loud: dict[str, object]
) -> None:
    """A batch computes what any of its requests asks for; a row that asked for nothing must have nothing left over."""
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    noisy = replace(plain, **loud)  # type: ignore[arg-type]
    with LLM(tiny_engines("llama-v2", max_batch_size=2), device="cpu") as llm:
        expected = llm.generate("hello d", plain)[0].token_ids
        assert byte_id(ord("a")) in expected
        llm.generate(["abc", "hello d"], noisy)
        first, second = llm.generate(["hello d", "hello d"], [plain, noisy])
    assert first.token_ids == expected
    assert byte_id(ord("a")) not in second.token_ids


def test_submitting_from_many_threads(tiny_llms: Callable) -> None:
    llm = tiny_llms("llama-v2")
    expected = llm.generate("hello d", GREEDY)[0].text
    texts: list[str] = []

    def work() -> None:
        for _ in range(5):
            texts.append(llm.generate("hello d", GREEDY)[0].text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [expected] * 40
    assert _idle(llm)


def test_long_prompts_do_not_starve_running_requests(tiny_engines: Callable) -> None:
    """While a queue of prompts is prefilled chunk by chunk, a running request gets tokens after every chunk."""
    with LLM(tiny_engines("llama-v2", max_num_tokens=16), device="cpu", prefix_cache=False) as llm:
        order: list[str] = []
        streams = Streams()

        def note(chunk: OutputChunk) -> None:
            order.extend([chunk.request_id] * bool(chunk.token_ids))
            streams.add(chunk)

        started = threading.Event()

        def first(chunk: OutputChunk) -> None:
            note(chunk)
            started.set()

        llm.submit("hello d", replace(GREEDY, max_tokens=200), first, request_id="running")
        assert started.wait(30)
        prompt = [ACTIVE[n % 16] for n in range(160)]
        for number in range(6):
            llm.submit(prompt, replace(GREEDY, max_tokens=2), note, request_id=f"prompt {number}")
        streams.wait(7)
    # Six prompts of ten chunks each: the running one goes on between the first tokens of two newcomers.
    firsts = [order.index(f"prompt {number}") for number in range(6)]
    assert firsts == sorted(firsts)
    for left, right in pairwise(firsts):
        assert order[left:right].count("running") >= 5
    # And the newcomers are not kept waiting until it has finished.
    assert order[firsts[-1] :].count("running") > 0


def test_more_requests_than_pages_wait_their_turn(tiny_engines: Callable) -> None:
    """The pool holds two requests of this extent; a windowed drafter layer does not change what is reserved."""
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=256) as llm:
        prompt = [ACTIVE[n % 16] for n in range(70)]
        outputs = llm.generate([prompt] * 9, replace(GREEDY, max_tokens=50))
        assert len({output.token_ids for output in outputs}) == 1
        assert _idle(llm)


def test_closing_ends_running_and_waiting_requests(tiny_engines: Callable) -> None:
    llm = LLM(tiny_engines("llama-v2", max_batch_size=2), device="cpu")
    streams, started = Streams(), threading.Event()

    def first(chunk: OutputChunk) -> None:
        streams.add(chunk)
        started.set()

    llm.submit("hello d", replace(GREEDY, max_tokens=230), first)
    for _ in range(5):
        llm.submit("hello d", replace(GREEDY, max_tokens=230), streams.add)
    assert started.wait(30)
    llm.close()
    assert [chunk.finish_reason for chunk in streams.last.values()] == ["cancelled"] * 6
    with pytest.raises(EngineError, match="closed"):
        llm.submit("hello d", GREEDY, streams.add)
    llm.close()

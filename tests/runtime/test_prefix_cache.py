"""Shared prefixes: what is reused, what may not be, and that nobody's output knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from collected_streams import Streams
from scheduled_requests import PAGE_TOKENS, Clock, make_request, make_scheduler, occupied
from tiny_pair import ACTIVE

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.pages import PagePool
from trtllm_dflash.runtime.prefix_cache import PrefixCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, frequency_penalty=0.4)
PREFIX = [ACTIVE[(3 * n + n // 7) % 16] for n in range(100)]


def _chain(cache: PrefixCache, pool: PagePool, tokens: list[int], salt: str | None = None) -> list[int]:
    pages = pool.take(len(tokens) // 4)
    cache.leave(tokens, [], pages, salt)
    return pages


def test_only_whole_pages_after_the_same_tokens_match() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 4)
    pages = _chain(cache, pool, list(range(12)))
    assert [node.page for node in cache.match(list(range(20)), 9, None)] == pages
    assert [node.page for node in cache.match(list(range(20)), 2, None)] == pages[:2]
    assert [node.page for node in cache.match(list(range(11)), 9, None)] == pages[:2]
    # The same page after other tokens is another page.
    assert cache.match([9, 9, 9, 9, 4, 5, 6, 7], 9, None) == []
    assert cache.match([0, 1, 2, 3, 9, 5, 6, 7], 9, None)[0].page == pages[0]
    assert cache.match(list(range(20)), 9, "salt") == []


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_page_in_use() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, 4)
    old, new = _chain(cache, pool, [*range(8)]), _chain(cache, pool, [*range(100, 108)])
    other = _chain(cache, pool, [*range(4), *range(50, 54)])
    assert (pool.free, cache.idle, cache.size) == (1, 5, 5), "the common first page is kept once"
    held = cache.match([*range(100, 108)], 9, None)
    cache.hold(held)
    assert cache.evict(1) == 1
    assert cache.match([*range(8)], 9, None) == cache.match([*range(4)], 9, None), "the end of the oldest chain went"
    assert cache.evict(9) == 2, "the rest of it, but nothing that is held"
    assert [node.page for node in cache.match([*range(100, 108)], 9, None)] == new
    cache.release(held)
    assert cache.evict(9) == 2
    assert (pool.free, cache.idle, cache.size) == (6, 0, 0)
    assert {*old, *new, *other} == set(range(6))


def test_copies_are_freed_and_salts_leave_nothing_behind() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, 4)
    _chain(cache, pool, [*range(8)])
    _chain(cache, pool, [*range(12)])
    assert (pool.free, cache.size) == (3, 3)
    for number in range(50):
        _chain(cache, pool, [*range(8)], salt=f"{number}")
        assert cache.evict(2) == 2
    assert len(cache._roots) <= 2
    assert pool.free + cache.size == 6


def test_a_prompt_is_shared_after_its_first_token_and_not_before() -> None:
    """Until then nobody knows that its K/V are numbers; meanwhile the next one waits instead of computing it again."""
    scheduler, clock = make_scheduler(slots=4), Clock()
    first, second, foreign, salted = (
        make_request(clock, tokens, salt=salt)
        for tokens, salt in ((range(40), None), (range(40), None), (range(100, 140), None), (range(40), "s"))
    )
    for request in (first, second, foreign, salted):
        scheduler.enqueue(request)
    assert scheduler.admit(0.0) == [first, foreign, salted]
    first.prefilled = 40
    assert scheduler.admit(0.0) == []
    first.output.append(7)
    assert scheduler.admit(0.0) == [second]
    # The last prompt token is computed by everyone, so its page is.
    assert second.prefilled == 4 * PAGE_TOKENS
    assert second.pages[:4] == first.pages[:4]
    occupied(scheduler, scheduler.running)


def test_nobody_waits_for_a_prefill_that_is_mostly_somebody_elses() -> None:
    scheduler, clock = make_scheduler(slots=4), Clock()
    for tokens in ([*range(16), *range(500, 600)], [*range(40)]):
        scheduler.enqueue(make_request(clock, tokens))
    assert len(scheduler.admit(0.0)) == 2


def test_a_failed_request_leaves_nothing() -> None:
    scheduler, clock = make_scheduler(), Clock()
    request = make_request(clock, range(40))
    scheduler.enqueue(request)
    scheduler.admit(0.0)
    assert len(scheduler.retire(request, 0)) == 6
    assert scheduler.page_counts().cached == 0


@pytest.mark.parametrize(("pair", "temperature"), [("llama-v2", 1.0), ("qwen3-v1", 0.0), ("qwen3-v2", 1.0)])
def test_output_and_acceptance_are_those_without_the_cache(
    tiny_engines: Callable, pair: str, temperature: float
) -> None:
    """Prompts of every overlap, windows in target and drafter, chunks of 16 tokens, and the second turn of a chat."""
    prompts = [PREFIX[:n] for n in (100, 99, 97, 96, 65, 64, 33, 32, 31, 1)] + [PREFIX[:70] + PREFIX[:20]]
    params = [replace(GREEDY, temperature=temperature, seed=n) for n in range(len(prompts))]
    engines = tiny_engines(pair, max_num_tokens=16)

    def run(**options: bool) -> tuple[list[tuple[int, ...]], list[float | None], dict[str, int]]:
        with LLM(engines, device="cpu", **options) as llm:
            outputs = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
            turn = [*prompts[0], *outputs[0].token_ids, *PREFIX[:9]]
            outputs += llm.generate(turn, params[0])
            stats = llm.stats()
            assert stats.pages_used == 0
            assert stats.pages_free + stats.pages_cached == stats.pages_total
            return [o.token_ids for o in outputs], [o.metrics.acceptance_length for o in outputs], stats.counters

    with_cache, without = run(), run(prefix_cache=False)
    assert with_cache[:2] == without[:2]
    total = sum(map(len, prompts)) + 100 + 30 + 9
    assert without[2]["prefill_tokens"] == total
    hits = with_cache[2]["prefix_hit_tokens"]
    assert with_cache[2]["prefill_tokens"] == total - hits
    # Prompts of 99 and 97, 96 and 65, 64 and 33 tokens, the one that branches off, and the chat.
    assert hits == 2 * 96 + 2 * 64 + 2 * 32 + 64 + 128


@pytest.mark.parametrize("length", [100, 98], ids=["inside a page", "at its end"])
def test_cached_pages_hold_what_a_prefill_would_compute(tiny_engines: Callable, length: int) -> None:
    """Both caches, float32, after the request that wrote them generated and left.

    Where the output ends with a page, that page stays out: its last token was emitted and never computed.
    """
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        output = llm.generate(PREFIX[:length], GREEDY)[0]
        sequence = [*PREFIX[:length], *output.token_ids]
        pages = len(sequence[:-1]) // 32
        session = llm.session
        before = [
            cache[:].clone()
            for layer in (*session.target_caches, *session.drafter_caches)  # type: ignore[attr-defined]
            for cache in (layer.k, layer.v)
        ]
        chain = llm._engine._scheduler._cache.match(sequence, 99, None)  # type: ignore[union-attr]
        assert len(chain) == pages
    with LLM(tiny_engines("llama-v2"), device="cpu") as fresh:
        fresh.generate(sequence, replace(GREEDY, max_tokens=1))
        own = fresh._engine._scheduler._cache.match(sequence, 99, None)  # type: ignore[union-attr]
        after = [
            cache
            for layer in (*fresh.session.target_caches, *fresh.session.drafter_caches)  # type: ignore[attr-defined]
            for cache in (layer.k, layer.v)
        ]
        for left, right in zip(before, after, strict=True):
            for old, new in zip(chain, own, strict=False):
                torch.testing.assert_close(left[old.page], right[new.page], rtol=1e-4, atol=1e-5)


def test_many_requests_with_one_prefix_at_once(tiny_engines: Callable) -> None:
    """Sixteen slots and one arrival time: the prefix is computed once, by the first."""
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        prompts = [[*PREFIX, *PREFIX[n : n + 5]] for n in range(40)]
        outputs = llm.generate(prompts, GREEDY)
        counters = llm.stats().counters
        assert counters["prefill_tokens"] == 105 + 39 * 9
        assert [o.metrics.cached_tokens for o in outputs] == [0, *[96] * 39]
    with LLM(tiny_engines("llama-v2"), device="cpu", prefix_cache=False) as plain:
        assert [o.token_ids for o in plain.generate(prompts, GREEDY)] == [o.token_ids for o in outputs]


def test_measuring_forgets_what_it_overwrites(tiny_engines: Callable) -> None:
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        expected = llm.generate(PREFIX, GREEDY)[0].token_ids
        assert llm.stats().pages_cached > 0
        profiler = llm.profiler
        assert llm.stats().pages_cached == 0
        profiler.stages(2, 4, context=100, repeats=1)
        assert llm.generate(PREFIX, GREEDY)[0].token_ids == expected


def test_salt_separates(tiny_engines: Callable) -> None:
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        for salt in ("a", "b", None, "a"):
            streams = Streams()
            llm.submit(PREFIX, GREEDY, streams.add, cache_salt=salt)
            streams.wait(1)
        counters = llm.stats().counters
        assert counters["prefix_hit_tokens"] == 96

"""Requests and schedulers for tests that need no engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.request import Request, RequestSpec
from trtllm_dflash.runtime.scheduler import AdmissionLimits, Scheduler
from trtllm_dflash.runtime.slots import SamplingMode
from trtllm_dflash.runtime.text import TextStream

PAGE_TOKENS = 8
_numbers = itertools.count()
_tokenizer = Tokenizer(WordLevel({"x": 0}, unk_token="x"))


class Clock:
    """Arrival times in order."""

    def __init__(self) -> None:
        self.now = 0.0

    def next(self) -> float:
        self.now += 0.001
        return self.now


def make_scheduler(
    *, slots: int = 4, num_pages: int = 64, prefix_cache: bool = True, limits: AdmissionLimits | None = None
) -> Scheduler:
    """Pages of 8 tokens; a pass needs at most 4 positions more."""
    return Scheduler(
        slots=slots,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        growth_tokens=4,
        prefix_cache=prefix_cache,
        limits=limits,
    )


def make_request(
    clock: Clock,
    prompt: int | Sequence[int],
    *,
    family: int | None = None,
    max_output_tokens: int = 8,
    priority: int = 0,
    deadline_s: float | None = None,
    salt: str | None = None,
    at: float | None = None,
    request_id: str | None = None,
) -> Request:
    """``prompt`` is its tokens, or how many: prompts of one family begin alike, others share nothing."""
    number = next(_numbers)
    if isinstance(prompt, int):
        start = 10**6 * (number + 100 if family is None else family)
        prompt = range(start, start + prompt)
    params = SamplingParams(temperature=0.0, max_tokens=max_output_tokens)
    spec = RequestSpec(
        request_id=request_id or f"r{number}",
        prompt=tuple(prompt),
        params=params,
        mode=SamplingMode.of(params),
        max_output_tokens=max_output_tokens,
        stop_ids=(),
        bad_words=(),
        seed=0,
        priority=priority,
        deadline_s=deadline_s,
        salt=salt,
    )
    text = TextStream(_tokenizer, (), include_stop=False)
    return Request(spec, text, lambda chunk: None, 4, arrival=clock.next() if at is None else at)


def occupied(scheduler: Scheduler, running: Sequence[Request]) -> None:
    """No page has two owners, unless both read it through the cache; the counts add up."""
    own = [page for request in running for page in request.pages[len(request.chain) :]]
    shared = {node.page for request in running for node in request.chain}
    assert len(own) == len(set(own))
    assert not shared & set(own)
    for request in running:
        assert [node.page for node in request.chain] == request.pages[: len(request.chain)]
    pages = scheduler.page_counts()
    assert pages.used == len(own) + len(shared)
    assert pages.free + pages.used + pages.cached == pages.total
    assert len({request.slot for request in running}) == len(running)

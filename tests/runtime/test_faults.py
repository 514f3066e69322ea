"""A fault is its own request's: others go on with the text they get alone, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_pair import ACTIVE, byte_id
from torch import Tensor

from trtllm_dflash.checkpoint.manifest import hash_file
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, TargetInputs, TargetOutputs
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.4)
# Never likely, so only who asks for it gets it.
POISON = byte_id(ord("~"))


@pytest.fixture
def llm(tiny_engines: Callable) -> Iterator[LLM]:
    with LLM(tiny_engines("llama-v2"), device="cpu") as one:
        yield one


def _idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def _fail_on_marker(llm: LLM, marker: int, network: str, *, after_passes: int) -> None:
    """From its given pass on, ``network`` raises for batches with the request whose prompt starts with ``marker``."""
    session, page_tokens = llm.session, llm.limits.page_tokens
    networks = {name: getattr(session, name) for name in ("target", "draft", "inject")}
    first_pages: set[int] = set()
    passes = {"seen": 0}

    def check(name: str, pages: set[int]) -> None:
        if name == network and pages & first_pages:
            passes["seen"] += 1
            if passes["seen"] >= after_passes:
                raise RuntimeError("injected fault")

    def target(self: object, inputs: TargetInputs) -> TargetOutputs:
        starts, pages = inputs.query_starts.tolist(), inputs.page_table[:, 0].tolist()
        for row, page in enumerate(pages):
            if int(inputs.positions[starts[row]]) == 0:
                is_marked = int(inputs.input_ids[starts[row]]) == marker
                (first_pages.add if is_marked else first_pages.discard)(page)
        check("target", set(pages))
        return networks["target"](inputs)

    def draft(self: object, inputs: DraftInputs, block_size: int) -> DraftOutputs:
        check("draft", set(inputs.page_table[:, 0].tolist()))
        return networks["draft"](inputs, block_size)

    def inject(self: object, features: Tensor, positions: Tensor, slots: Tensor, **arguments: Any) -> None:
        check("inject", set((slots // page_tokens).tolist()))
        networks["inject"](features, positions, slots, **arguments)

    for function in (target, draft, inject):
        setattr(session, function.__name__, MethodType(function, session))


@pytest.mark.parametrize(
    ("network", "after_passes"),
    [("target", 1), ("target", 4), ("draft", 1), ("draft", 3), ("inject", 1), ("inject", 2)],
)
def test_exception_fails_only_the_guilty_request(llm: LLM, network: str, after_passes: int) -> None:
    """In its prefill, or in a later cycle in the middle of a batch."""
    # One page only, so that every pass over the request touches its first page.
    prompts = ["hello d", [POISON, *[ACTIVE[2]] * 5], "abc", "a b c d"]
    params = replace(GREEDY, max_tokens=24)
    expected = [llm.generate(prompt, params)[0] for prompt in prompts]
    _fail_on_marker(llm, POISON, network, after_passes=after_passes)
    outputs = llm.generate(prompts, params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length", "length"]
    assert "RuntimeError" in (outputs[1].error or "")
    assert outputs[1].token_ids == expected[1].token_ids[: len(outputs[1].token_ids)]
    assert len(outputs[1].token_ids) < 24
    for index in (0, 2, 3):
        assert outputs[index].token_ids == expected[index].token_ids
        assert outputs[index].text == expected[index].text
    assert _idle(llm)
    assert llm.stats().counters["requests_failed"] == 1


@pytest.fixture(scope="module")
def poisoned_engines(tiny_engines: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The qwen3-v2 engines with NaN in one embedding row: it spreads through everything that reads the token.

    ``convert`` refuses such weights, so the built file is changed, and its hash with it. The target is untied, so its
    head is whole.
    """
    engines = tmp_path_factory.mktemp("poisoned") / "engines"
    shutil.copytree(tiny_engines("qwen3-v2"), engines)
    name = "target/rank0.safetensors"
    weights = load_file(engines / name)
    weights["transformer.vocab_embedding.weight"][POISON] = float("nan")
    save_file(weights, engines / name)
    config = json.loads((engines / "config.json").read_text())
    config["files"][name] = asdict(hash_file(engines / name))
    (engines / "config.json").write_text(json.dumps(config))
    return engines


@pytest.mark.fault("NaN logits")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_a_prompt(tiny_llms: Callable, poisoned_engines: Path, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=1)
    prompts = ["hello d", [POISON, *[ACTIVE[2]] * 40], "abc"]
    expected = [tiny_llms("qwen3-v2").generate(prompt, params)[0].token_ids for prompt in prompts]
    with LLM(poisoned_engines, device="cpu") as llm:
        outputs = llm.generate(prompts, params)
        assert _idle(llm)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "not numbers" in (outputs[1].error or "")
    assert outputs[1].token_ids == ()
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]


@pytest.mark.fault("NaN logits")
@pytest.mark.parametrize("max_tokens", [2, 3, 5, 30])
def test_nan_in_a_cycle_stays_in_its_request(tiny_llms: Callable, poisoned_engines: Path, max_tokens: int) -> None:
    """The guilty request emits the poisoned token, and with few tokens left its block is padded.

    It is the longest of the batch, so the others' page tables end in the page where padded rows are written.
    """
    guilty = replace(GREEDY, max_tokens=max_tokens, logit_bias={POISON: 100.0})
    prompts = [[ACTIVE[2]] * 90, "abc", "hello d"]
    each = [guilty, GREEDY, GREEDY]
    clean = tiny_llms("qwen3-v2")
    expected = [clean.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, each, strict=True)]
    assert expected[0][0] == POISON
    with LLM(poisoned_engines, device="cpu") as llm:
        outputs = llm.generate(prompts, each)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].token_ids == (POISON,)
    assert [output.token_ids for output in outputs[1:]] == expected[1:]


@pytest.mark.fault("NaN logits")
def test_next_owner_of_poisoned_pages_is_unaffected(tiny_llms: Callable, poisoned_engines: Path) -> None:
    """The pool holds one request of this extent, so its pages are taken over whole."""
    innocent = [ACTIVE[n % 16] for n in range(200)]
    params = replace(GREEDY, max_tokens=40)
    expected = tiny_llms("qwen3-v2").generate(innocent, params)[0].token_ids
    with LLM(poisoned_engines, device="cpu", kv_cache_tokens=256) as llm:
        assert llm.generate([POISON] * 216, params)[0].finish_reason == "error"
        assert llm.generate(innocent, params)[0].token_ids == expected


@pytest.mark.fault("NaN logits")
def test_a_poisoned_prompt_is_not_cached(tiny_llms: Callable, poisoned_engines: Path) -> None:
    """It shares its first pages with a healthy prompt, before and after; only the healthy one's pages are kept."""
    healthy = [ACTIVE[n % 16] for n in range(100)]
    poisoned = [*healthy[:70], POISON, *healthy[:70]]
    params = replace(GREEDY, max_tokens=20)
    expected = tiny_llms("qwen3-v2").generate(healthy, params)[0].token_ids
    with LLM(poisoned_engines, device="cpu") as llm:
        assert llm.generate(poisoned, params)[0].finish_reason == "error"
        assert llm.stats().pages_cached == 0
        for _ in range(2):
            assert llm.generate(healthy, params)[0].token_ids == expected
            assert llm.generate(poisoned, params)[0].finish_reason == "error"
        # 119 computed positions of the healthy one.
        assert llm.stats().pages_cached == 3
        assert _idle(llm)


def test_a_callback_that_raises_ends_its_own_request(llm: LLM) -> None:
    expected = llm.generate("hello d", GREEDY)[0].token_ids

    def bad(chunk: OutputChunk) -> None:
        raise ValueError("a callback's own fault")

    llm.submit("abc", replace(GREEDY, max_tokens=200), bad)
    assert llm.generate("hello d", GREEDY)[0].token_ids == expected
    done = threading.Event()
    llm.submit("abc", GREEDY, lambda chunk: done.set() if chunk.finish_reason else None)
    assert done.wait(30)
    assert _idle(llm)


def test_generate_raises_what_its_callback_raises(llm: LLM) -> None:
    def bad(index: int, chunk: OutputChunk) -> None:
        raise ValueError("a callback's own fault")

    with pytest.raises(ValueError, match="own fault"):
        llm.generate(["abc", "hello d"], replace(GREEDY, max_tokens=200), on_chunk=bad)
    assert llm.generate("hello d", GREEDY)[0].finish_reason == "length"


@pytest.mark.fault("client gone")
def test_stream_whose_event_loop_is_gone(llm: LLM) -> None:
    """The consumer's loop may be closed before the cancelled request's last chunk is delivered."""

    async def leave() -> None:
        stream = llm.stream("abc", replace(GREEDY, max_tokens=200))
        await anext(stream)
        await stream.aclose()

    for _ in range(10):
        asyncio.run(leave())
    assert llm.generate("hello d", GREEDY)[0].finish_reason == "length"
    assert _idle(llm)

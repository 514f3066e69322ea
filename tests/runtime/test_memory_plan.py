"""The memory plan: it stays within what may be taken, says what fits where that is too little, and is obeyed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime import memory
from trtllm_dflash.runtime.llm import LLM

MIB = 2**20


def _free(monkeypatch: pytest.MonkeyPatch, usable: int) -> None:
    """A machine where ``usable`` bytes may be taken: half of what is free."""
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: 2 * usable)


def _bytes(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def test_the_plan_is_what_is_taken(tiny_engines: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """Both models' caches, their scratch pages and everything that is kept per slot; all of it is printed."""
    with caplog.at_level(logging.INFO, "trtllm_dflash"), LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        plan, session = llm.memory, llm.session
        caches = [part for layer in (*session.target_caches, *session.drafter_caches) for part in (layer.k, layer.v)]
        assert plan.cache_bytes == _bytes(caches)
        # Four target and two drafter layers of two heads of 16 numbers, K and V in float32.
        assert plan.cache_bytes == (plan.num_pages + 1) * plan.page_tokens * 6 * 2 * 16 * 2 * 4
        state = [value for value in vars(llm._engine._state).values() if isinstance(value, Tensor)]
        assert plan.state_bytes == _bytes(state)
        assert plan.weight_bytes == session.weight_bytes() > 0
    parts = plan.weight_bytes + plan.cache_bytes + plan.state_bytes + plan.pass_bytes + plan.graph_bytes
    assert plan.total_bytes == parts
    assert f"{parts / MIB:.0f} MiB: weights" in caplog.text
    assert f"KV caches of {plan.tokens} tokens ({plan.full_requests} whole sequences)" in caplog.text


def test_recorded_passes_share_memory(tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernels: the larger pass counts, not both; a budget beyond one pass costs nothing; the logits of
    first tokens lie beside the pool."""

    def pass_bytes(max_num_tokens: int, block_size: int, graphs: int) -> int:
        session = load_session(tiny_engines("llama-v2", max_num_tokens=max_num_tokens), device="cpu")
        monkeypatch.setattr(session, "uses_kernels", True)
        return memory.plan_memory(session, None, block_size=block_size, graphs=graphs).pass_bytes

    vocab_size = load_session(tiny_engines("llama-v2"), device="cpu").target_config.vocab_size
    logits = 16 * vocab_size * 4
    prefill, verify = pass_bytes(2048, 1, 0), pass_bytes(16, 6, 0)
    assert pass_bytes(2048, 6, 0) == max(prefill, verify)
    assert pass_bytes(2048, 6, 5) <= max(prefill, verify) + 64 * vocab_size * 4
    assert pass_bytes(2048, 6, 5) >= max(prefill, verify) + logits
    assert pass_bytes(8192, 6, 5) == pass_bytes(2048, 6, 5)
    assert pass_bytes(8192, 6, 0) == pass_bytes(2048, 6, 0)


def test_logits_are_a_part_of_the_largest_pass(tiny_engines: Callable) -> None:
    """The target's and the drafter's, of every row of every block of a full batch, in float32."""
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    before = memory.plan_memory(session, None, block_size=6, graphs=0).pass_bytes
    session.target_config = replace(session.target_config, vocab_size=50_000)
    after = memory.plan_memory(session, None, block_size=6, graphs=0).pass_bytes
    assert after - before > 2 * 16 * 6 * (50_000 - 1000) * 4


def test_no_more_is_taken_than_may_be(tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are there already. Fewer pages than all slots could fill are said, not hidden."""
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    page_bytes = session.cache_bytes_per_page()
    for usable in range(2 * MIB, 9 * MIB, page_bytes // 3 + 1):
        _free(monkeypatch, usable)
        plan = memory.plan_memory(session, None, block_size=6, graphs=0)
        taken = plan.cache_bytes + plan.state_bytes + plan.pass_bytes + plan.graph_bytes
        assert taken <= usable
        assert plan.full_requests == plan.tokens // 256 >= 1
        # Nor less, up to a page, unless all slots can be full.
        assert usable - taken < page_bytes or plan.full_requests == 16
    assert plan.full_requests == 16


def test_too_little_says_the_largest_batch_that_fits(tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = tiny_engines("llama-v2", max_batch_size=64)
    _free(monkeypatch, 2 * MIB)
    with pytest.raises(EngineError, match=r"0 KV cache pages fit .* of 2 MiB that may be taken, slots need") as caught:
        LLM(engines, device="cpu")
    found = re.search(r"build with --max-batch-size (\d+)$", caught.value.hint or "")
    assert found is not None
    fits = int(found[1])
    assert 1 <= fits < 64
    with LLM(tiny_engines("llama-v2", max_batch_size=fits), device="cpu") as llm:
        assert llm.memory.full_requests >= 1
    with pytest.raises(EngineError) as caught:
        LLM(tiny_engines("llama-v2", max_batch_size=fits + 1), device="cpu")
    assert caught.value.hint == f"free memory, or build with --max-batch-size {fits}"


def test_no_batch_at_all_fits(tiny_engines: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, MIB // 2)
    with pytest.raises(EngineError, match="0 KV cache pages fit") as caught:
        LLM(tiny_engines("llama-v2"), device="cpu")
    assert caught.value.hint == "free memory, or build with a smaller --max-seq-len or --max-num-tokens"

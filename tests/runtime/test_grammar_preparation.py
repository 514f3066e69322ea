"""Grammars that take too long: nobody but their own request may notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.runtime.grammar import GrammarCompiler, GrammarRun
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

pytest.importorskip("xgrammar", reason="structured output needs the extra `structured`")

EOS = 2
TIMEOUT_S = 2.0
QUICK = StructuredOutput("regex", "[ab]{3}")


def slow(number: int = 0) -> StructuredOutput:
    """It keeps xgrammar busy for minutes, with counts that are allowed."""
    return StructuredOutput.parse({"json_schema": {"type": "string", "pattern": "(a?){9999}" * 6 + "b" * number}})


@pytest.fixture(scope="module")
def tokenizer(tiny_engines: Callable) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_engines("llama-v2") / "tokenizer")


@pytest.fixture
def compiler(tokenizer: PreTrainedTokenizerBase) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), timeout_s=TIMEOUT_S, workers=2)
    yield compiler
    compiler.close()


def start(compiler: GrammarCompiler, wanted: StructuredOutput) -> GrammarRun:
    return compiler.start(wanted, [EOS], lambda: None)


def test_a_slow_grammar_ends_in_time_and_the_next_is_served(compiler: GrammarCompiler) -> None:
    start(compiler, QUICK).wait()
    began = time.monotonic()
    run = start(compiler, slow())
    assert time.monotonic() - began < 1.0
    assert not run.is_ready
    with pytest.raises(RequestError, match="structured_output took longer than 2 s to prepare"):
        run.wait()
    assert time.monotonic() - began < 60
    assert run.failure_kind == "request"
    again = start(compiler, StructuredOutput("regex", "c+"))
    again.wait()
    assert again.is_ready


def test_a_slow_grammar_does_not_hold_up_others(compiler: GrammarCompiler) -> None:
    held_up = start(compiler, slow())
    quick = start(compiler, QUICK)
    quick.wait()
    assert quick.is_ready
    # The same one again needs no second worker.
    shared = start(compiler, slow())
    start(compiler, StructuredOutput("regex", "d+")).wait()
    for run in (held_up, shared):
        with pytest.raises(RequestError, match="took longer"):
            run.wait()


def test_a_prepared_grammar_is_remembered(compiler: GrammarCompiler) -> None:
    start(compiler, QUICK).wait()
    assert start(compiler, StructuredOutput("regex", "[ab]{3}")).is_ready
    assert not start(compiler, StructuredOutput("regex", "[ab]{4}")).is_ready


def test_closing_ends_what_is_being_prepared(compiler: GrammarCompiler) -> None:
    start(compiler, QUICK).wait()
    run = start(compiler, slow())
    time.sleep(0.2)
    compiler.close()
    with pytest.raises(EngineError, match="closed"):
        run.wait()
    with pytest.raises(EngineError, match="closed"):
        start(compiler, StructuredOutput("regex", "e"))


def test_deadline_and_cancel_hold_while_a_grammar_is_prepared(tiny_engines: Callable) -> None:
    ends: dict[str, OutputChunk] = {}
    done = threading.Semaphore(0)

    def note(chunk: OutputChunk) -> None:
        if chunk.finish_reason is not None:
            ends[chunk.request_id] = chunk
            done.release()

    params = SamplingParams(max_tokens=5, structured_output=slow())  # type: ignore[arg-type]
    with LLM(tiny_engines("llama-v2"), device="cpu") as llm:
        began = time.monotonic()
        llm.submit("hello d", params, note, request_id="late", deadline_s=0.3)
        llm.submit("hello d", params, note, request_id="unwanted")
        llm.cancel("unwanted")
        llm.submit("hello d", SamplingParams(max_tokens=5), note, request_id="plain")
        for _ in range(3):
            assert done.acquire(timeout=8)
        assert time.monotonic() - began < 8
    assert (ends["late"].error_kind, ends["unwanted"].finish_reason) == ("deadline", "cancelled")
    assert ends["plain"].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a?){50000}"},
        {"regex": "a{2,10001}"},
        {"regex": "a{" + "9" * 5000 + "}"},
        {"json_schema": {"properties": {"x": {"type": "string", "pattern": "(a?){50000}"}}}},
        {"json_schema": {"patternProperties": {"a{10001,}": {}}}},
        {"grammar": 'root ::= "a"{50000}'},
    ],
)
def test_large_counts_are_refused_at_once(form: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="at most 10000"):
        StructuredOutput.parse(form)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a{10000}"},
        {"regex": r"\{50000} [{]50000}"},
        {"json_schema": {"const": "a{50000}", "description": "x{50000}"}},
        {"grammar": 'root ::= "a{50000}" [{] # {50000}'},
    ],
)
def test_braces_that_are_text_are_no_counts(form: dict[str, object]) -> None:
    StructuredOutput.parse(form)

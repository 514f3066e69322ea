"""Structured output under speculation: always in the grammar, always what plain decoding gives, always ended."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from reference_decoding import output_distribution
from scipy.stats import chisquare
from tiny_pair import ACTIVE, BOS, EOS, VOCAB_SIZE, byte_id

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.runtime.outputs import OutputChunk

pytest.importorskip("xgrammar", reason="structured output needs the extra `structured`")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", "the end"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "kind", "ages", "alive"],
}
FORMS: dict[str, dict[str, object]] = {
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": r"[a-e]{4}-(the|an|日本)+[0-9]{2}"},
    "grammar": {"grammar": 'root ::= "the " item (", " item)* "."\nitem ::= [a-d]+ | "é"'},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


def _with(form: Mapping[str, object], params: SamplingParams = GREEDY) -> SamplingParams:
    return replace(params, structured_output=form)  # type: ignore[arg-type]


def _fits(form: str, text: str) -> bool:
    if form in ("schema", "object"):
        document = json.loads(text)
        return isinstance(document, dict) and (form == "object" or list(document) == list(SCHEMA["properties"]))
    pattern = {"regex": r"[a-e]{4}-(the|an|日本)+[0-9]{2}", "grammar": r"the ([a-d]+|é)(, ([a-d]+|é))*\."}[form]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("pair", ["llama-v2", "qwen3-v1", "qwen3-v2"])
@pytest.mark.parametrize("form", FORMS)
def test_greedy_equals_plain_decoding(tiny_llms: Callable, pair: str, form: str) -> None:
    prompts = ["hello d", "a b c", [ACTIVE[5]] * 40]
    fast, plain = tiny_llms(pair), tiny_llms(pair, speculation="off")
    outputs = fast.generate(prompts, _with(FORMS[form]))
    expected = plain.generate(prompts, _with(FORMS[form]))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.text for o in outputs] == [o.text for o in expected]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
    for output in outputs:
        assert output.finish_reason == "length" or _fits(form, output.text)


@pytest.mark.parametrize("form", ["schema", "regex"])
def test_every_sampled_output_is_in_the_grammar(tiny_llms: Callable, form: str) -> None:
    """At temperature 1 with neighbours that have no grammar, whose tokens are what they get alone."""
    llm = tiny_llms("llama-v2")
    free = SamplingParams(temperature=1.0, max_tokens=30, seed=1, ignore_eos=True)
    alone = llm.generate("hello d", free)[0].token_ids
    params = [_with(FORMS[form], SamplingParams(temperature=1.0, max_tokens=230, seed=n)) for n in range(30)]
    mixed = [one for pair in zip(params, [free] * 30, strict=True) for one in pair]
    outputs = llm.generate(["hello d"] * 60, mixed)
    assert {output.token_ids for output in outputs[1::2]} == {alone}
    for output in outputs[::2]:
        assert output.finish_reason == "stop"
        assert _fits(form, output.text), output.text
        assert output.token_ids[-1] == EOS
    assert len({output.text for output in outputs[::2]}) > 20
    assert sum(output.metrics.accepted_tokens for output in outputs[::2]) > 0


def test_grammar_with_overlapped_cycles(tiny_engines: Callable, tiny_llms: Callable) -> None:
    """Each of its cycles needs the result of the one before; neighbours without a grammar do not."""
    each = [_with(FORMS["schema"], SamplingParams(temperature=1.0, max_tokens=200, seed=n)) for n in range(6)]
    each += [SamplingParams(temperature=1.0, max_tokens=60, seed=n, ignore_eos=True) for n in range(6)]
    expected = tiny_llms("llama-v2").generate(["hello d"] * 12, each)
    with LLM(tiny_engines("llama-v2"), device="cpu", options=EngineOptions(overlap=True)) as llm:
        outputs = llm.generate(["hello d"] * 12, each)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_grammar_that_ends_inside_a_block(tiny_llms: Callable) -> None:
    """The drafter goes on proposing; behind the end only a stop token is possible."""
    likely = "".join(chr(c) for c in b"abcde")
    for length in range(1, 14):
        (output,) = tiny_llms("llama-v2").generate("hello d", _with({"regex": f"[{likely}]{{{length}}}"}))
        assert (output.finish_reason, len(output.text)) == ("stop", length)
        assert output.token_ids[-1] == EOS
        assert output.metrics.completion_tokens == len(output.token_ids)


def test_stop_token_of_the_request_ends_the_grammar(tiny_llms: Callable) -> None:
    stop = byte_id(ord("f"))
    params = replace(_with({"regex": "[abc]{5}"}), ignore_eos=True, stop_token_ids=(stop,))
    (output,) = tiny_llms("llama-v2").generate("hello d", params)
    assert (output.finish_reason, output.token_ids[-1], len(output.text)) == ("stop", stop, 5)


def test_distribution_is_the_targets_within_the_grammar(tiny_engines: Callable, tiny_pairs: Callable) -> None:
    """Chi-square against exact enumeration: the grammar allows the three letters, as banning all other tokens does."""
    letters = [byte_id(c) for c in b"abc"]
    prompt = [BOS, ACTIVE[3], ACTIVE[5]]
    banned = {token: -100.0 for token in range(VOCAB_SIZE) if token not in letters}
    exact = output_distribution(
        tiny_pairs("llama-v2").model, prompt, SamplingParams(temperature=1.0, logit_bias=banned), 3, prune=0.0
    )
    exact = {tokens: p for tokens, p in exact.items() if p > 0}
    count = 3000
    params = [
        SamplingParams(temperature=1.0, max_tokens=10, seed=n, structured_output={"regex": "[abc]{3}"})  # type: ignore[arg-type]
        for n in range(count)
    ]
    with LLM(tiny_engines("llama-v2", max_batch_size=64), device="cpu") as llm:
        outputs = llm.generate([prompt] * count, params)
    found = Counter(output.token_ids[:3] for output in outputs)
    assert set(found) <= set(exact)
    common = [tokens for tokens, p in exact.items() if p * count >= 5]
    rest = count - sum(found[tokens] for tokens in common)
    expected_rest = count - sum(exact[tokens] * count for tokens in common)
    observed = [*(found[tokens] for tokens in common), rest]
    expected = [*(exact[tokens] * count for tokens in common), expected_rest]
    if expected_rest < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected = [value * sum(observed) / sum(expected) for value in expected]
    assert chisquare(observed, expected).pvalue > 1e-4


def test_special_tokens_are_not_text(tiny_llms: Callable) -> None:
    """Their names would match the expression, but they leave nothing in the text."""
    params = [_with({"regex": ".{40}"}, SamplingParams(temperature=5.0, seed=n, max_tokens=60)) for n in range(20)]
    for output in tiny_llms("llama-v2").generate(["hello d"] * 20, params):
        assert all(token >= 5 for token in output.token_ids[:-1])
        assert len(output.text) == 40


@pytest.mark.parametrize("extra", [{"min_tokens": 40}, {"bad_words": ("a", "b")}, {"logit_bias": {EOS: -100.0}}])
def test_grammar_wins_over_parameters_that_leave_nothing(tiny_llms: Callable, extra: dict[str, object]) -> None:
    (output,) = tiny_llms("llama-v2").generate("hello d", replace(_with({"regex": "[ab]{6}"}), **extra))
    assert (output.finish_reason, len(output.text)) == ("stop", 6)
    assert set(output.text) <= {"a", "b"}


def test_grammar_without_an_end_is_cut_by_the_limit(tiny_llms: Callable) -> None:
    (output,) = tiny_llms("llama-v2").generate("hello d", _with({"grammar": 'root ::= "ab" root'}))
    assert output.finish_reason == "length"
    assert output.text.startswith("abab")


def test_dead_end_is_an_error_of_the_request(tiny_llms: Callable) -> None:
    """JSON strings cannot hold a control character, so no token is left where the pattern wants one."""
    form = {"json_schema": {"type": "string", "pattern": "^ab\\x01$"}}
    chunks: list[OutputChunk] = []
    llm = tiny_llms("llama-v2")
    (output,) = llm.generate("hello d", _with(form), on_chunk=lambda _, chunk: chunks.append(chunk))
    assert output.finish_reason == "error"
    assert (output.error or "").startswith("structured_output")
    assert chunks[-1].error_kind == "request"
    assert llm.stats().pages_used == 0


def test_preemption_keeps_the_place_in_the_grammar(tiny_engines: Callable, tiny_llms: Callable) -> None:
    params = [_with({"regex": "(ab|cd){40}[0-9]{5}"}, SamplingParams(temperature=1.0, seed=n)) for n in range(10)]
    prompts = [[ACTIVE[n]] * 30 for n in range(10)]
    expected = tiny_llms("llama-v2").generate(prompts, params)
    with LLM(tiny_engines("llama-v2"), device="cpu", kv_cache_tokens=32 * 9) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().counters["preemptions"] > 0
    assert [o.text for o in outputs] == [o.text for o in expected]
    assert {o.finish_reason for o in outputs} == {"stop"}


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"json_schema": {"type": "strnig"}}, "Unsupported type"),
        ({"json_schema": '{"type":'}, "a JSON schema"),
        ({"json_schema": [1]}, "neither an object"),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "minimum greater than maximum"),
        ({"regex": "("}, "parenthesis"),
        ({"grammar": "root ::= other"}, 'Rule "other" is not defined'),
        ({"regex": ""}, "not empty"),
        ({"regex": "a" * 70000}, "at most 65536 bytes"),
        ({"json_object": False}, "true for json_object"),
        ({"lark": "x"}, "one key of json_schema"),
        ({"regex": "a", "grammar": "b"}, "one key of json_schema"),
        ("json", "one key of json_schema"),
    ],
)
def test_invalid_forms_are_refused_before_anything_is_queued(tiny_llms: Callable, form: object, named: str) -> None:
    llm = tiny_llms("llama-v2")
    before = llm.stats()
    with pytest.raises(RequestError, match="structured_output") as refusal:
        llm.generate("hello d", SamplingParams(structured_output=form))  # type: ignore[arg-type]
    assert named in str(refusal.value)
    assert "/project" not in str(refusal.value)
    assert llm.stats().counters == before.counters


def test_deeply_nested_schema_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="structured_output"):
        StructuredOutput.parse({"json_schema": schema})


def test_output_that_nothing_could_end_is_refused(tiny_llms: Callable) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        tiny_llms("llama-v2").generate("hello d", replace(_with({"regex": "a"}), ignore_eos=True))


def test_without_the_library_the_request_is_refused(tiny_llms: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match="not installed") as refusal:
        tiny_llms("llama-v2").generate("hello d", _with({"regex": "a"}))
    assert "structured" in (refusal.value.hint or "")

"""One load on a real (tiny) engine: in this process, and through Triton's and OpenAI's protocols."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_doubles import served

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.configuration import Configuration, open_configuration
from trtllm_dflash.bench.load import Load
from trtllm_dflash.bench.measurement import Measurement
from trtllm_dflash.bench.predict_requests import read_cycle_table
from trtllm_dflash.bench.run import run_point
from trtllm_dflash.bench.served import find_served_model
from trtllm_dflash.bench.stages import stage_seconds, write_cycle_table
from trtllm_dflash.bench.workload import Workload, make_workload
from trtllm_dflash.errors import ConfigError

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=False)


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"the an {letter} in"}) + "\n" for letter in "abcdefgh"))
    return make_workload(dataset, GREEDY)


def _measure(configuration: Configuration, workload: Workload, **load: Any) -> Measurement:
    opened = open_configuration(configuration, workload, device="cpu", concurrency=2)
    try:
        return run_point(opened, workload, Load(2, None, 6, **load))
    finally:
        opened.close()


def test_in_process_acceptance_is_the_engines_own(
    tiny_engines: Callable[..., Path], tiny_llms: Callable[..., LLM], workload: Workload
) -> None:
    acceptance = _measure(Configuration("tiny", engines=tiny_engines("llama-v2")), workload).acceptance
    outputs = tiny_llms("llama-v2").generate(list(workload.prompts[:6]), GREEDY)
    assert acceptance is not None
    assert acceptance.cycles == sum(output.metrics.cycles for output in outputs)
    assert acceptance.accepted == sum(output.metrics.accepted_tokens for output in outputs)
    assert acceptance.acceptance_length == pytest.approx(1 + acceptance.accepted / acceptance.cycles)


def test_stages_and_cycle_table_are_the_engines_own_measurements(
    tiny_engines: Callable[..., Path], workload: Workload, tmp_path: Path
) -> None:
    opened = open_configuration(Configuration("tiny", engines=tiny_engines("llama-v2")), workload, device="cpu")
    assert opened.llm is not None
    try:
        stages = stage_seconds(opened, 2, 24)
        write_cycle_table(opened.llm, tmp_path / "cycles.json", batches=(1, 2), block_sizes=(1, 4))
        after = run_point(opened, workload, Load(2, None, 6))
    finally:
        opened.close()
    assert stages is not None
    assert {"verify", "draft_and_select", "inject"} <= stages.keys()
    assert min(stages.values()) > 0
    table = read_cycle_table(tmp_path / "cycles.json")
    assert {size: set(column) for size, column in table.items()} == {1: {1, 2}, 4: {1, 2}}
    # Measuring left the engine as it was.
    assert (
        after.outputs_sha256 == _measure(Configuration("b", engines=tiny_engines("llama-v2")), workload).outputs_sha256
    )


def test_forced_acceptance_is_what_was_asked_for(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    forced = make_workload(None, params, count=8, synthetic_prompt_tokens=16, vocab_size=200, forced_acceptance=2.5)
    measured = _measure(Configuration("forced", engines=tiny_engines("llama-v2")), forced)
    assert measured.acceptance is not None
    # The last cycle of a request is cut by its limit.
    assert measured.acceptance.acceptance_length == pytest.approx(2.5, abs=0.15)


def test_speculation_off_gives_the_same_outputs_and_no_acceptance(
    tiny_engines: Callable[..., Path], workload: Workload
) -> None:
    engines = tiny_engines("llama-v2")
    on = _measure(Configuration("on", engines=engines), workload)
    off = _measure(Configuration("off", engines=engines, speculation="off"), workload)
    assert off.acceptance is None
    assert on.acceptance is not None
    assert on.outputs_sha256 == off.outputs_sha256


def test_triton_is_measured_as_the_engine_is(
    tiny_engines: Callable[..., Path], tiny_llms: Callable[..., LLM], workload: Workload
) -> None:
    engines = tiny_engines("llama-v2")
    local = _measure(Configuration("local", engines=engines), workload)
    with served(tiny_llms("llama-v2"), "triton") as url:
        remote = _measure(Configuration("triton", url=url, tokenizer=engines), workload)
    assert remote.outputs_sha256 == local.outputs_sha256
    assert remote.completion_tokens == local.completion_tokens
    assert remote.acceptance is not None
    assert local.acceptance is not None
    assert remote.acceptance.acceptance_length == pytest.approx(local.acceptance.acceptance_length)
    assert remote.acceptance.histogram == local.acceptance.histogram


def test_an_openai_endpoint_gives_usage_and_acceptance(tiny_llms: Callable[..., LLM], workload: Workload) -> None:
    llm = tiny_llms("llama-v2")
    with served(llm, "openai") as url:
        remote = _measure(Configuration("openai", url=url), workload)
    outputs = llm.generate(list(workload.prompts[:6]), GREEDY)
    lengths = [output.metrics.completion_tokens for output in outputs]
    assert remote.completion_tokens == pytest.approx(sum(lengths) / 6)
    assert remote.acceptance is not None
    assert remote.acceptance.cycles == sum(output.metrics.cycles for output in outputs)
    assert sum(remote.acceptance.histogram or ()) == remote.acceptance.cycles


def test_a_refused_request_is_an_error_of_that_request(tiny_llms: Callable[..., LLM], tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(json.dumps({"prompt": "the"}) + "\n")
    too_long = make_workload(dataset, SamplingParams(max_tokens=200, temperature=0.0))
    with served(tiny_llms("llama-v2"), "openai") as url, pytest.raises(Exception, match="HTTP 400"):
        _measure(Configuration("openai", url=url), too_long)


def test_a_triton_model_needs_a_tokenizer_for_chat(tiny_llms: Callable[..., LLM], workload: Workload) -> None:
    with served(tiny_llms("llama-v2"), "triton") as url, pytest.raises(ConfigError, match="no tokenizer was given"):
        open_configuration(Configuration("triton", url=url), workload)


def test_nobody_at_the_url_is_said(unused_port: int) -> None:
    with pytest.raises(ConfigError, match="nothing answers"):
        find_served_model(f"http://127.0.0.1:{unused_port}")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_prompts_that_do_not_fit_are_left_out(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(json.dumps({"prompt": "a" * 400}) + "\n" + json.dumps({"prompt": "the"}) + "\n")
    opened = open_configuration(
        Configuration("tiny", engines=tiny_engines("llama-v2")), make_workload(dataset, GREEDY), device="cpu"
    )
    opened.close()
    assert len(opened.prompts) == 1
    assert opened.facts["prompts_left_out"] == 1


@pytest.mark.parametrize("length", [0.0, 0.99, -1.0, float("nan"), float("inf")])
def test_a_cycle_cannot_be_forced_to_less_than_its_own_token(length: float) -> None:
    """With 0 a request would never end."""
    with pytest.raises(ConfigError, match="expected a number of at least 1"):
        make_workload(None, GREEDY, synthetic_prompt_tokens=16, vocab_size=100, forced_acceptance=length)


def test_a_forced_length_that_no_block_has_is_refused(tiny_engines: Callable[..., Path]) -> None:
    forced = make_workload(None, GREEDY, synthetic_prompt_tokens=16, vocab_size=200, forced_acceptance=6.5)
    with pytest.raises(ConfigError, match=r"forced acceptance length is 6\.5, expected at most 6"):
        open_configuration(Configuration("forced", engines=tiny_engines("llama-v2")), forced, device="cpu")


def test_random_prompts_only_with_forced_acceptance() -> None:
    with pytest.raises(ConfigError, match="without a forced acceptance length"):
        make_workload(None, GREEDY, synthetic_prompt_tokens=16, vocab_size=100)
    forced = make_workload(None, GREEDY, synthetic_prompt_tokens=16, vocab_size=100, forced_acceptance=3.0)
    assert {len(prompt) for prompt in forced.prompts} == {16}
    assert all(25 <= token < 75 for prompt in forced.prompts for token in prompt)

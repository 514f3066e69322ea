"""The whole way on a real engine: convert, build, deploy, tritonserver, clients; texts are ``LLM.generate``'s."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.serving.client import TritonHttpError, token_ids
from trtllm_dflash.serving.engine_facts import read_engine_facts
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

if TYPE_CHECKING:
    from fake_triton import Api

pytestmark = pytest.mark.triton

PROMPTS = [[5 + index, 7, 11 + 2 * index, 3] for index in range(16)]


@pytest.fixture(scope="module")
def engines(tiny_engines: Callable[..., Path]) -> Path:
    from tiny_pair import PAIRS

    return tiny_engines(next(iter(PAIRS)))


@pytest.fixture(scope="module")
def served(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed (pip install 'trtllm-dflash[triton]')")
    root = tmp_path_factory.mktemp("tiny")
    deploy(engines, root / "repository", device="cpu")
    with triton_server(root / "repository", log=root / "triton.log", start_timeout_s=120) as server:
        yield server


@pytest.mark.parametrize(
    ("sampling", "params"),
    [
        ({"temperature": 0.0}, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)),
        (
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.1},
            SamplingParams(
                max_tokens=24, temperature=0.7, top_k=20, top_p=0.9, seed=11, repetition_penalty=1.1, ignore_eos=True
            ),
        ),
    ],
    ids=["greedy", "sampled"],
)
def test_sixteen_streams_equal_generate(
    served: ServerHandle, engines: Path, sampling: dict[str, object], params: SamplingParams
) -> None:
    def stream(prompt: list[int]) -> tuple[str, list[int]]:
        events = list(served.client().generate_stream(input_ids=prompt, max_tokens=24, ignore_eos=True, **sampling))
        text = "".join(str(event["text_output"]) for event in events)
        return text, [token for event in events for token in token_ids(event)]

    with LLM(engines, device="cpu") as llm:
        expected = [(output.text, list(output.token_ids)) for output in llm.generate(PROMPTS, params)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(stream, PROMPTS)) == expected


@pytest.fixture(scope="module")
def api(served: ServerHandle) -> Iterator[Api]:
    pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")
    from fake_triton import running_gateway

    with running_gateway(served.http_url) as api:
        yield api


def test_chat_over_http_equals_generate(api: Api, engines: Path) -> None:
    """Template, usage, log probabilities and acceptance are the engine's own, greedy and sampled."""
    messages = [{"role": "user", "content": "abc"}]
    for temperature, seed in ((0.0, None), (0.8, 5)):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True, logprobs=2)
        with LLM(engines, device="cpu") as llm:
            (expected,) = llm.generate([messages], params)
        options = {} if seed is None else {"seed": seed}
        status, answer, _ = api.chat(
            "abc", max_tokens=20, temperature=temperature, ignore_eos=True, logprobs=True, top_logprobs=2, **options
        )
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
        assert answer["usage"]["completion_tokens"] == 20
        assert expected.logprobs is not None
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
        content = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert content.decode(errors="replace").startswith(expected.text[:5])
        speculation = answer["metrics"]["speculative_decoding"]
        assert speculation["mean_acceptance_length"] == pytest.approx(expected.metrics.acceptance_length)
        assert tuple(speculation["acceptance_histogram"]) == expected.metrics.accepted_histogram


def test_samples_of_one_seed_differ_and_repeat(api: Api) -> None:
    def texts() -> list[str]:
        choices = api.complete("abc", n=3, seed=9, max_tokens=12, temperature=1.0, ignore_eos=True)[1]["choices"]
        return [choice["text"] for choice in choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_max_tokens_that_does_not_fit_is_refused_there_and_cut_here(api: Api, served: ServerHandle) -> None:
    """The front end as vLLM, the tensors as TensorRT-LLM; without a limit a chat ends where the sequence is full."""
    room = 256 - 200
    status, answer, _ = api.complete([5] * 200, max_tokens=room + 1)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert f"max_tokens: got {room + 1}, expected at most {room}: this model's maximum" in answer["error"]["message"]
    assert api.complete([5] * 200, max_tokens=room, ignore_eos=True)[1]["usage"]["completion_tokens"] == room
    assert api.complete([5] * 250, ignore_eos=True)[1]["usage"]["completion_tokens"] == 6  # not asked for: 16, cut
    status, answer, _ = api.chat("abc", ignore_eos=True)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"]["total_tokens"] == 256
    end = served.client().generate(input_ids=[5] * 200, max_tokens=1000, ignore_eos=True)
    assert end["finish_reason"] == "length"
    (warning,) = json.loads(str(end["request_metrics"]))["warnings"]
    assert warning.startswith(f"max_tokens: got 1000, cut to {room}")


def test_structured_output_over_http(api: Api) -> None:
    pytest.importorskip("xgrammar", reason="pip install 'trtllm-dflash[structured]'")
    properties = {"a": {"enum": ["b", "c"]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        status, answer, _ = api.chat("abc", response_format=form, max_tokens=60, temperature=1.0, seed=seed)
        assert status == 200, answer
        assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("b", "c")
    form["json_schema"]["schema"] = {"type": "no-such-type"}  # type: ignore[index]
    status, answer, _ = api.chat("abc", response_format=form)
    assert (status, answer["error"]["param"]) == (400, "response_format")


def test_startup_line_says_what_runs(tiny_engines: Callable[..., Path]) -> None:
    from tiny_pair import PAIRS

    for name, (_, recipe) in PAIRS.items():
        facts = read_engine_facts(tiny_engines(name))
        line = facts.startup_line()
        assert f"speculation DFlash {facts.runs['speculation'][-1]}, block size" in line
        assert "captured layers" in line
        assert "windows" in line
        assert "backend torch" in line
        assert len(facts.runs["windows"].split()) == recipe.layers
        assert "max batch size 16" in line


def test_limits_are_the_engines(served: ServerHandle) -> None:
    with pytest.raises(
        TritonHttpError, match=r"HTTP 400: INVALID_ARGUMENT: text_input: got '300 tokens', .* 255 tokens"
    ):
        served.client().generate(input_ids=[5] * 300, max_tokens=1)


def test_abandoned_streams_give_their_pages_back(served: ServerHandle) -> None:
    def stats() -> dict[str, int]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.6)  # longer than a heartbeat
            health = served.client().health()
            found = health["stats"]
            if health["in_flight"] == 0 and isinstance(found, dict) and found.get("running") == 0:
                return found
        raise AssertionError("requests are still running")

    def abandon(index: int) -> None:
        stream = served.client().generate_stream(
            input_ids=PROMPTS[index % 16], max_tokens=200, ignore_eos=True, return_log_probs=index % 2 == 0
        )
        next(stream)
        stream.close()

    before = stats()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abandon, range(24)))
    after = stats()
    assert after["pages_free"] + after["pages_cached"] == before["pages_free"] + before["pages_cached"]
    assert after["pages_used"] == before["pages_used"]

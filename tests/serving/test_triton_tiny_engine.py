"""The whole way on a real engine: convert, build, deploy, tritonserver, clients; texts are ``LLM.generate``'s."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.serving.client import TritonHttpError, token_ids
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

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

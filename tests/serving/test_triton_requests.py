"""Requests to a real tritonserver: HTTP, SSE and gRPC, good and bad, many at once, abandoned."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine_process import LIMITS, PAGES

from trtllm_dflash.serving.client import TritonHttpError, token_ids
from trtllm_dflash.serving.tritonserver import ServerHandle

pytestmark = pytest.mark.triton


def words(count: int) -> str:
    return "".join(f"{number} " for number in range(count))


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.05)


def pages_free(triton: ServerHandle) -> int:
    stats = triton.client().health()["stats"]
    assert isinstance(stats, dict)
    return int(stats.get("pages_free", -1))


def test_generate_answers_once(triton: ServerHandle) -> None:
    answer = triton.client().generate("hi", max_tokens=5, return_log_probs=True)
    assert answer["text_output"] == words(5)
    assert answer["token_ids"] == [0, 1, 2, 3, 4]
    assert answer["finish_reason"] == "length"
    assert (answer["total_draft_tokens"], answer["total_accepted_draft_tokens"]) == (21, 2)
    assert answer["acceptance_rate"] == pytest.approx(2 / 21, rel=1e-6)
    assert answer["output_log_probs"] == [-0.5] * 5
    assert answer["cum_log_probs"] == -2.5


def test_generate_stream_is_incremental(triton: ServerHandle) -> None:
    events = list(triton.client().generate_stream("hi", max_tokens=40, return_log_probs=True))
    assert len(events) > 3
    assert "".join(str(event["text_output"]) for event in events) == words(40)
    assert [token for event in events for token in token_ids(event)] == list(range(40))
    assert [("finish_reason" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["cum_log_probs"] == -20.0


def test_stream_false_is_one_event(triton: ServerHandle) -> None:
    events = list(triton.client().generate_stream("hi", max_tokens=40, stream=False))
    assert [event["text_output"] for event in events] == [words(40)]


@pytest.mark.parametrize(
    "client",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.000001, "min_length": 12, "end_id": 1048576},
    ],
    ids=["vllm", "genai", "sglang"],
)
def test_requests_of_load_generators_for_tensorrt_llm(triton: ServerHandle, client: dict) -> None:
    """What the ``generate_stream`` clients of other projects' benchmarks send, and how they read the answer."""
    body = {"accumulate_tokens": True, "text_input": "hi", "top_p": 1.0, "max_tokens": 12, "stream": True, **client}
    connection = http.client.HTTPConnection(triton.http_url.split("/")[2], timeout=10)
    connection.request("POST", f"/v2/models/{triton.model_name}/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200
    lines = [line.removeprefix(b"data:") for line in response.read().splitlines() if line]
    connection.close()
    assert "".join(json.loads(line)["text_output"] for line in lines) == words(12)


def test_grpc_stream_ends_with_the_final_flag(triton: ServerHandle) -> None:
    """Legacy client scripts send ``[1, 1]`` tensors over a gRPC stream and wait for the final flag."""
    grpc = pytest.importorskip("tritonclient.grpc")
    import numpy as np

    answers: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(triton.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        inputs = []
        for name, kind, array in (
            ("text_input", "BYTES", np.array([[b"hi"]], dtype=np.object_)),
            ("max_tokens", "INT32", np.array([[9]], dtype=np.int32)),
            ("stream", "BOOL", np.array([[True]])),
            ("stop_words", "BYTES", np.array([[b"a", b"b"]], dtype=np.object_)),
        ):
            tensor = grpc.InferInput(name, list(array.shape), kind)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        client.async_stream_infer(triton.model_name, inputs, request_id="1")
        text, final = "", False
        while not final:
            result, error = answers.get(timeout=10)
            assert error is None
            text += result.as_numpy("text_output")[0, 0].decode()
            final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert text == words(9)
    assert answers.empty()


def test_grpc_errors_carry_the_code(triton: ServerHandle) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    import numpy as np

    answers: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(triton.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error), headers={"triton_grpc_error": "true"})
        text = grpc.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"hi"]], dtype=np.object_))
        nan = grpc.InferInput("temperature", [1, 1], "FP32")
        nan.set_data_from_numpy(np.array([[np.nan]], dtype=np.float32))
        client.async_stream_infer(triton.model_name, [text, nan])
        error = answers.get(timeout=10)
        client.stop_stream()
    assert "INVALID_ARGUMENT" in str(error.status())
    assert "temperature: got nan" in error.message()


BAD_INPUTS = [
    (
        {"text_input": "w " * LIMITS.max_seq_len},
        "text_input: got '2048 tokens', expected at most max_seq_len - 1 = 2047",
    ),
    ({"text_input": ""}, "text_input: got ''"),
    ({"max_tokens": 1}, "text_input: got None"),
    ({"input_ids": [1000]}, "input_ids: got 1000, expected token ids in 0..999"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens: got 0"),
    ({"text_input": "x", "max_tokens": -3}, "max_tokens: got -3"),
    ({"text_input": "x", "top_k": -1}, "top_k: got -1"),
    ({"text_input": "x", "top_p": 1.5}, "top_p: got 1.5"),
    ({"text_input": "x", "temperature": -1.0}, "temperature: got -1.0"),
    ({"text_input": "x", "temperature": float("nan")}, "temperature: got nan"),
    ({"text_input": "x", "repetition_penalty": 0.0}, "repetition_penalty: got 0.0"),
    ({"text_input": "x", "beam_width": 4}, "beam_width: got 4, expected 1"),
    ({"text_input": "x", "num_return_sequences": 2}, "num_return_sequences: got 2, expected 1"),
    ({"text_input": "x", "guided_decoding_guide": "{}"}, "guided_decoding_guide_type: got None, expected one of json"),
    ({"text_input": "x", "guided_decoding_guide_type": "regex"}, "guided_decoding_guide: got None"),
    ({"text_input": "x", "no_such_input": 1}, "no_such_input: got 1"),
    ({"text_input": "x", "end_id": -2}, "end_id: got -2, expected a token id in 0..999"),
]


@pytest.mark.parametrize(("inputs", "message"), BAD_INPUTS, ids=[text.split(",")[0][:40] for _, text in BAD_INPUTS])
def test_bad_input_is_a_400_with_limit_and_value(triton: ServerHandle, inputs: dict, message: str) -> None:
    for call in (triton.client(10).generate, lambda **given: list(triton.client(10).generate_stream(**given))):
        with pytest.raises(TritonHttpError) as caught:
            call(**inputs)
        assert caught.value.status == 400
        assert f"INVALID_ARGUMENT: {message}" in caught.value.text
    assert triton.client().ready()
    assert triton.client().generate("hi", max_tokens=1)["text_output"] == "0 "


def test_sixteen_streams_at_once(triton: ServerHandle) -> None:
    def one(index: int) -> str:
        count = 20 + 7 * index
        return "".join(str(event["text_output"]) for event in triton.client().generate_stream("hi", max_tokens=count))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [words(20 + 7 * index) for index in range(16)]


def test_queue_is_bounded(triton: ServerHandle) -> None:
    """16 running and 8 waiting fit; the others hear so at once, and the ones inside finish."""
    started = threading.Barrier(30)

    def one(_: int) -> str:
        started.wait()
        try:
            return str(triton.client().generate("hi", max_tokens=300)["finish_reason"])
        except TritonHttpError as error:
            return error.text

    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(one, range(30)))
    assert results.count("length") == LIMITS.max_batch_size + 8
    refusals = [text for text in results if text != "length"]
    assert len(refusals) == 30 - LIMITS.max_batch_size - 8
    for text in refusals:
        assert text.startswith("UNAVAILABLE: queue: got 8 waiting requests, expected fewer than max_queue=8")


def test_disconnects_free_their_pages(triton: ServerHandle) -> None:
    chance = random.Random(3)

    def abandon(index: int) -> None:
        stream = triton.client().generate_stream("hi", max_tokens=2000, return_log_probs=index % 2 == 0)
        for _ in range(chance.randint(1, 4)):
            next(stream)
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abandon, range(40)))

    def all_are_cancelled() -> bool:
        # The statistics are the last heartbeat's: right after the disconnects they may still be from before.
        stats = triton.client().health()["stats"]
        return isinstance(stats, dict) and int(stats["requests_cancelled"]) >= 40

    wait_until(all_are_cancelled)
    wait_until(lambda: triton.client().health()["in_flight"] == 0 and pages_free(triton) == PAGES)


def test_stop_ends_the_request_of_the_same_id(triton: ServerHandle) -> None:
    client = triton.client()
    stream = client.generate_stream("hi", max_tokens=2000, id="mine")
    next(stream)
    client.generate(stop=True, id="mine")
    assert list(stream)[-1]["finish_reason"] == "cancelled"


def test_health_endpoint_of_the_supervisor(triton: ServerHandle) -> None:
    assert triton.health_url is not None
    connection = http.client.HTTPConnection(triton.health_url.split("/")[2], timeout=5)
    connection.request("GET", "/health")
    response = connection.getresponse()
    facts = json.loads(response.read())
    assert (response.status, facts["status"]) == (200, "ready")

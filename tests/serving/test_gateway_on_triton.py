"""The front end in front of a real tritonserver: streams, cancels, refusals, faults, metrics on both endpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")
pytest.importorskip("aiohttp", reason="pip install 'trtllm-dflash[openai]'")

from fake_engine_process import LIMITS, PAGES
from fake_triton import Api, running_gateway, wait_until
from prometheus_client.parser import text_string_to_metric_families

from trtllm_dflash.serving.metric_definitions import METRICS
from trtllm_dflash.serving.tritonserver import ServerHandle

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def api(triton: ServerHandle) -> Iterator[Api]:
    with running_gateway(triton.http_url) as api:
        yield api


def words(count: int) -> str:
    return "".join(f"{number} " for number in range(count))


def pages_free(triton: ServerHandle) -> int:
    stats = triton.client().health()["stats"]
    assert isinstance(stats, dict)
    return int(stats.get("pages_free", -1))


def test_streamed_and_whole_answers_agree(api: Api) -> None:
    chunks = api.chunks(max_tokens=40, stream_options={"include_usage": True})
    assert len(chunks) > 5
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    whole = api.chat(max_tokens=40)[1]
    assert text == whole["choices"][0]["message"]["content"] == words(40)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 40, "total_tokens": 41}
    histogram = whole["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert len(histogram) == LIMITS.block_size
    assert sum(histogram) == whole["metrics"]["speculative_decoding"]["num_spec_steps"] == 20


def test_logprobs_come_through(api: Api) -> None:
    content = api.chat(max_tokens=3, logprobs=True, top_logprobs=2)[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["0", "1", "2"]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[1]["bytes"] == [ord("1")]


def test_the_templates_refusal_is_a_400(api: Api) -> None:
    body = {"model": "dflash", "messages": [{"role": "system", "content": "x"}]}
    status, answer, _ = api.ask("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_deadline_is_a_504(api: Api) -> None:
    status, answer, _ = api.chat(max_tokens=2000, deadline_s=0.1)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


def test_full_queue_is_a_429_with_a_time(api: Api) -> None:
    start = threading.Barrier(30)

    def one(_: int) -> tuple[int, str]:
        start.wait()
        status, _, headers = api.chat(max_tokens=200)
        return status, headers.get("retry-after", "")

    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(one, range(30)))
    statuses = [status for status, _ in results]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == LIMITS.max_batch_size + 8
    assert all(int(retry) >= 1 for status, retry in results if status == 429)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_pages(api: Api, triton: ServerHandle, stream: bool) -> None:
    def abandon(index: int) -> None:
        connection = api.connection()
        body = {"model": "dflash", "prompt": "x", "max_tokens": 2000, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        time.sleep(0.05 + 0.01 * index)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(abandon, range(12)))
    wait_until(lambda: triton.client().health()["in_flight"] == 0 and pages_free(triton) == PAGES, timeout_s=5)


def test_a_waiting_client_that_leaves_gives_its_place_up(api: Api, triton: ServerHandle) -> None:
    """Triton does not tell the model about a closed connection before the model writes to it."""
    running = [api.open_stream(max_tokens=2000) for _ in range(LIMITS.max_batch_size)]
    connection = api.connection()
    connection.request("POST", "/v1/completions", json.dumps({"model": "dflash", "prompt": "x"}))
    wait_until(lambda: triton.client().health()["in_flight"] == LIMITS.max_batch_size + 1)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: triton.client().health()["in_flight"] == LIMITS.max_batch_size, timeout_s=3)
    for stream, _ in running:
        stream.close()
    wait_until(lambda: triton.client().health()["in_flight"] == 0)


def test_metrics_count_what_was_done(api: Api, triton: ServerHandle) -> None:
    def totals(text: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    # The parser adds _total to every counter; the sums and counts of histograms are counters here.
                    name = re.sub(r"(_sum|_count)_total$", r"\1", sample.name)
                    key = name + "".join(
                        value for name, value in sorted(sample.labels.items()) if name not in ("model", "replica")
                    )
                    found[key] = sample.value
        return found

    def triton_totals() -> dict[str, float]:
        with urllib.request.urlopen(triton.metrics_url) as answer:
            return totals(answer.read().decode())

    time.sleep(2.7)  # the last heartbeat, and the publication of it
    before = triton_totals()
    for count in (10, 20, 30):
        assert api.chat(max_tokens=count)[0] == 200
    assert api.chat(top_k=-1)[0] == 400
    time.sleep(2.7)
    after, gateway = triton_totals(), totals(api.ask("GET", "/metrics")[1])
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["dflash_output_tokens_total"] == 60
    assert grown["dflash_prompt_tokens_total"] == 3
    assert grown["dflash_cycles_total"] == 30
    assert grown["dflash_accepted_tokens_total"] == 30
    assert grown["dflash_accepted_tokens_per_position_total1"] == 30
    assert grown["dflash_requests_totallength"] == 3
    assert grown["dflash_requests_totalrefused"] == 1
    assert grown["dflash_errors_totalINVALID_ARGUMENT"] == 1
    assert grown["dflash_request_seconds_count"] == 3
    assert grown["dflash_inter_token_seconds_count"] == 54  # all but the first two of each request
    assert after["dflash_kv_pagesfree"] == PAGES
    assert after["dflash_engine_up"] == 1
    shared = {name for name in gateway if name.startswith("dflash_") and "gateway" not in name and "info" not in name}
    assert {name: after.get(name) for name in shared} == pytest.approx({name: gateway[name] for name in shared})


def test_metric_names_on_tritons_endpoint_are_the_defined_ones(triton: ServerHandle) -> None:
    with urllib.request.urlopen(triton.metrics_url) as answer:
        names = {line.split()[2] for line in answer.read().decode().splitlines() if line.startswith("# TYPE dflash")}
    expected = set()
    for name, metric in METRICS.items():
        if not name.startswith(("dflash_prefix", "dflash_preemptions", "dflash_pages_evicted")):  # the runtime's own
            expected |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")} if metric.buckets else {name}
    assert expected - names <= {"dflash_errors_total"}


def test_killed_engine_in_the_middle(api: Api, triton: ServerHandle) -> None:
    connection, answer = api.open_stream(max_tokens=2000)
    answer.readline()
    os.kill(int(str(triton.client().health()["engine_pid"])), signal.SIGKILL)
    rest = answer.read().decode()
    connection.close()
    error = json.loads(rest.split("data: ")[-2])
    assert error["error"]["code"] == "engine_unavailable"
    assert rest.endswith("data: [DONE]\n\n")
    wait_until(lambda: triton.client().health()["state"] == "ready", timeout_s=20)
    wait_until(lambda: api.chat(max_tokens=2)[0] == 200, timeout_s=20)

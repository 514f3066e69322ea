"""Who gets in, how much, and what happens when somebody leaves or a replica is not there."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="pip install 'trtllm-dflash[openai]'")
pytest.importorskip("aiohttp", reason="pip install 'trtllm-dflash[openai]'")

from fake_triton import HELLO, FakeTriton, event, last, running_gateway, wait_until
from prometheus_client.parser import text_string_to_metric_families

from trtllm_dflash.serving.gateway.settings import hash_keys

SLOW = [event("a", [1]), 30.0, last("b", [2])]


def test_api_key() -> None:
    with FakeTriton() as triton, running_gateway(triton.url, api_key_hashes=hash_keys("one, two")) as api:
        body = {"model": "dflash", "prompt": "x"}
        wrong = ({}, {"authorization": "Bearer no"}, {"authorization": "Basic one"}, {"authorization": "Bearer "})
        for given in wrong:
            status, answer, headers = api.ask("POST", "/v1/completions", body, given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert api.ask("GET", "/v1/models")[0] == 401
        for key in ("one", "two"):
            assert api.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})[0] == 200
        assert api.ask("GET", "/health")[0] == 200  # probes have no key
        assert len(triton.inputs) == 2


def test_large_bodies_never_reach_triton() -> None:
    with FakeTriton() as triton, running_gateway(triton.url, max_body_bytes=10_000) as api:
        assert api.complete("x" * 20_000)[:2][0] == 413
        # Without a length the body is counted as it comes.
        connection = api.connection()
        blocks = (b"x" * 1000 for _ in range(20))
        connection.request(
            "POST", "/v1/completions", blocks, encode_chunked=True, headers={"transfer-encoding": "chunked"}
        )
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "request_too_large")
        connection.close()
        assert triton.inputs == []
        assert api.complete("x" * 5_000)[0] == 200


def test_a_body_that_does_not_come_ends_the_wait() -> None:
    with FakeTriton() as triton, running_gateway(triton.url, body_timeout_s=0.3) as api:
        with socket.create_connection(("127.0.0.1", api.port), timeout=10) as stream:
            stream.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert stream.recv(100).startswith(b"HTTP/1.1 408")
        assert triton.inputs == []


def test_requests_at_a_time_are_bounded() -> None:
    with FakeTriton() as triton, running_gateway(triton.url, max_in_flight=1) as api:
        triton.script = list(SLOW)
        connection, answer = api.open_stream()
        assert answer.status == 200
        status, body, headers = api.chat()
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        connection.close()
        wait_until(lambda: api.gateway is not None and api.gateway.in_flight == 0)
        triton.script = list(HELLO)
        assert api.chat()[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("events", [[event("a", [1]), 30.0], [30.0]], ids=["running", "waiting"])
def test_a_client_that_leaves_ends_its_generation(stream: bool, events: list[object]) -> None:
    with FakeTriton() as triton, running_gateway(triton.url) as api:
        triton.script = events
        connection = api.connection()
        body = {"model": "dflash", "prompt": "x", "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        wait_until(lambda: len(triton.inputs) == 1)
        time.sleep(0.1)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: triton.dropped == 1)
        wait_until(lambda: triton.stopped == [triton.inputs[0]["id"]])
        wait_until(lambda: api.gateway is not None and api.gateway.in_flight == 0)
        metrics = api.ask("GET", "/metrics")[1]
        assert 'dflash_gateway_requests_total{path="/v1/completions",status="499"} 1.0' in metrics


def test_load_is_spread_over_replicas() -> None:
    with FakeTriton() as first, FakeTriton() as second, running_gateway(first.url, second.url) as api:
        for triton in (first, second):
            triton.script = [event("a", [1]), 0.5, last("b", [2])]
        with ThreadPoolExecutor(8) as pool:
            assert [status for status, *_ in pool.map(lambda _: api.chat(), range(8))] == [200] * 8
        assert (len(first.inputs), len(second.inputs)) == (4, 4)


def test_a_full_or_dead_replica_is_passed_over() -> None:
    with FakeTriton() as first, FakeTriton() as second, running_gateway(first.url, second.url) as api:
        first.refusal = (400, "UNAVAILABLE: queue: got 8 waiting requests; try again in 3 s")
        assert api.chat()[0] == 200
        assert (len(first.inputs), len(second.inputs)) == (1, 1)
        second.refusal = first.refusal
        status, _, headers = api.chat()
        assert (status, headers["retry-after"]) == (429, "3")
        first.__exit__()
        second.refusal = None
        assert api.chat()[0] == 200
        wait_until(lambda: api.ask("GET", "/health")[1] == {"status": "ready", "replicas": ["unreachable", "ready"]})
        second.facts["state"] = "restarting"
        wait_until(lambda: api.ask("GET", "/health")[0] == 503)
        assert api.chat()[0] == 200  # the proxy lets it wait for the new engine


def test_more_sequences_than_the_replicas_hold_is_a_wrong_request() -> None:
    with FakeTriton() as first, FakeTriton() as second:
        for triton in (first, second):
            triton.facts["max_queue"] = 2  # and four slots
        with running_gateway(first.url, second.url) as api:
            status, body, headers = api.chat(n=13)
            assert (status, body["error"]["param"], "retry-after" in headers) == (400, "n", False)
            assert "at most 12 sequences" in body["error"]["message"]
            assert api.complete(["x"] * 13)[1]["error"]["param"] == "prompt"
            assert api.complete(["x"] * 6, n=2)[0] == 200
            assert len(api.chat(n=12)[1]["choices"]) == 12


def test_no_replica_at_all() -> None:
    with running_gateway("http://127.0.0.1:9") as api:
        assert api.ask("GET", "/health/ready")[0] == 503
        assert api.ask("GET", "/health/live")[0] == 200
        status, body, headers = api.chat()
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "engine_unavailable", "5")
        assert "127.0.0.1" not in json.dumps(body)


def test_draining_refuses_the_new_and_keeps_the_old() -> None:
    with FakeTriton() as triton, running_gateway(triton.url) as api:
        triton.script = [event("a", [1]), 0.5, last("b", [2])]
        found: list[int] = []
        running = threading.Thread(target=lambda: found.append(api.chat()[0]))
        running.start()
        wait_until(lambda: len(triton.inputs) == 1)
        assert api.gateway is not None
        api.gateway.draining = True
        status, body, headers = api.chat()
        assert (status, body["error"]["code"], headers["connection"]) == (503, "shutting_down", "close")
        assert api.ask("GET", "/health/ready")[1]["status"] == "draining"
        running.join()
        assert found == [200]


def test_metrics_are_prometheus_text() -> None:
    with FakeTriton() as triton:
        triton.facts["samples"] = [
            ["dflash_output_tokens_total", {}, 42],
            ["dflash_kv_pages", {"state": "free"}, 7],
            ["dflash_queue_seconds_bucket", {"le": "0.1"}, 1],
            ["dflash_queue_seconds_bucket", {"le": "+Inf"}, 2],
            ["dflash_queue_seconds_sum", {}, 0.5],
            ["dflash_queue_seconds_count", {}, 2],
            ["dflash_unheard_of_total", {}, 1],
        ]
        with running_gateway(triton.url) as api:
            api.chat()
            families = {family.name: family for family in text_string_to_metric_families(api.ask("GET", "/metrics")[1])}
    assert [sample.value for sample in families["dflash_output_tokens"].samples] == [42]
    assert families["dflash_kv_pages"].samples[0].labels == {"replica": "0", "state": "free"}
    assert families["dflash_queue_seconds"].type == "histogram"
    assert [sample.value for sample in families["dflash_queue_seconds"].samples] == [1, 2, 0.5, 2]
    assert families["dflash_unheard_of"].type == "counter"
    assert families["dflash_engine_up"].samples[0].value == 1
    assert families["dflash_gateway_time_to_first_token_seconds"].type == "histogram"
    (requests,) = families["dflash_gateway_requests"].samples
    assert (requests.labels, requests.value) == ({"path": "/v1/chat/completions", "status": "200"}, 1)


def test_log_lines_are_json_with_ids(caplog: pytest.LogCaptureFixture) -> None:
    from trtllm_dflash.serving.log_format import JsonLines

    with FakeTriton() as triton, running_gateway(triton.url) as api, caplog.at_level("INFO", "trtllm_dflash.gateway"):
        answer = api.ask("POST", "/v1/completions", {"model": "dflash", "prompt": "x"}, {"x-request-id": "mine"})[1]
    (record,) = [record for record in caplog.records if record.name == "trtllm_dflash.gateway"]
    line = json.loads(JsonLines().format(record))
    assert (line["request_id"], line["completion_id"], line["status"]) == ("mine", answer["id"], 200)
    assert line["completion_tokens"] == 4


def test_api_does_not_need_torch() -> None:
    """The front end starts in a fraction of a second and takes little memory: it must not import the runtime."""
    import subprocess
    import sys

    code = (
        "import sys; import trtllm_dflash.serving.gateway.__main__\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

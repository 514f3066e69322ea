"""The proxy model with Triton's side played by this test: a deadline holds whatever the engine does."""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_dflash.serving import metric_definitions, wire
from trtllm_dflash.serving.tritonserver import engine_is_down

PROXY = Path(__file__).parents[2] / "triton_server_repo" / "dflash" / "1"
ENGINE = Path(__file__).parent / "fake_engine_process.py"


class Sender:
    """Collects the responses of one request."""

    def __init__(self) -> None:
        self.responses: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.responses.put((response, flags))

    def is_cancelled(self) -> bool:
        return False

    def end(self) -> Any:
        """The last response; the ones before are passed over."""
        while True:
            response, flags = self.responses.get(timeout=10)
            if flags:
                return response


def fake_backend_utils() -> Any:
    def error(text: str, code: str) -> SimpleNamespace:
        return SimpleNamespace(text=text, code=code)

    for code in ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"):
        setattr(error, code, code)

    class Metrics:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, **given: object) -> None: ...

        def Metric(self, **given: object) -> Metrics:
            return self

        def set(self, value: float) -> None: ...

        def increment(self, value: float) -> None: ...

    return SimpleNamespace(
        TritonError=error,
        TritonModelException=RuntimeError,
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        MetricFamily=Metrics,
        Logger=SimpleNamespace(log_warn=print, log_error=print, log_info=print),
    )


def request(sender: Sender, **inputs: object) -> Any:
    tensors = []
    for name, value in inputs.items():
        given: Any = value.encode() if isinstance(value, str) else value
        kind = np.object_ if isinstance(value, str) else np.float32 if isinstance(value, float) else None
        array = np.array([[given]], dtype=kind)
        tensors.append(SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array))
    return SimpleNamespace(
        inputs=lambda: tensors, parameters=lambda: "", request_id=lambda: "", get_response_sender=lambda: sender
    )


class Proxy:
    """The proxy model around a counting engine that takes a minute for a step."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def ask(self, **inputs: object) -> Sender:
        sender = Sender()
        self.model.execute([request(sender, **inputs)])
        return sender

    def health(self) -> dict[str, Any]:
        (tensor,) = self.ask(control="health").end().tensors
        return dict(json.loads(tensor.array.item()))


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def proxy(hold: Path) -> Iterator[Proxy]:
    parameters = {
        "max_queue": "4",
        "restart_wait_s": "60",
        "engine_command": json.dumps([sys.executable, str(ENGINE), "--step-s", "60", "--hold", str(hold)]),
        "start_timeout_s": "60",
        "heartbeat_timeout_s": "60",
        "stall_timeout_s": "600",
    }
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROXY))
        patch.setitem(sys.modules, "triton_python_backend_utils", fake_backend_utils())
        patch.setitem(sys.modules, "wire", wire)
        patch.setitem(sys.modules, "metric_definitions", metric_definitions)
        for name in ("model", "engine_link", "metric_publisher"):
            patch.delitem(sys.modules, name, raising=False)
        model = importlib.import_module("model").TritonPythonModel()
        model.initialize({"model_config": json.dumps(config), "model_name": "dflash"})
        try:
            yield Proxy(model)
        finally:
            os.kill(model.link.facts()["engine_pid"], signal.SIGKILL)
            hold.unlink(missing_ok=True)
            model.finalize()
            for name in ("model", "engine_link", "metric_publisher"):
                sys.modules.pop(name, None)


def ends_at_its_deadline(proxy: Proxy) -> None:
    began = time.monotonic()
    error = proxy.ask(text_input="hi", stream=True, deadline_s=0.3).end().error
    assert 0.3 <= time.monotonic() - began < 5.0
    assert error.text == "DEADLINE_EXCEEDED: the request was not finished within its deadline_s = 0.3"
    assert proxy.health()["in_flight"] == 0


def test_an_engine_that_beats_but_does_not_move(proxy: Proxy) -> None:
    ends_at_its_deadline(proxy)


def test_the_proxy_says_how_many_requests_it_holds(proxy: Proxy) -> None:
    facts = proxy.health()
    assert (facts["limits"]["max_batch_size"], facts["max_queue"]) == (16, 4)


def test_a_frozen_engine(proxy: Proxy) -> None:
    engine = proxy.health()["engine_pid"]
    os.kill(engine, signal.SIGSTOP)
    try:
        ends_at_its_deadline(proxy)
    finally:
        os.kill(engine, signal.SIGCONT)


def test_an_engine_that_restarts(proxy: Proxy, hold: Path) -> None:
    hold.touch()
    os.kill(proxy.health()["engine_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while proxy.health()["state"] != "restarting":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ends_at_its_deadline(proxy)
    while not proxy.health()["loading"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    facts = proxy.health()
    assert not engine_is_down({**facts, "down_s": 600.0})  # it loads for long: leave it alone
    assert engine_is_down({**facts, "down_s": 600.0, "loading": False})
    assert not engine_is_down({**facts, "down_s": 1.0, "loading": False})
    hold.unlink()
    while (facts := proxy.health())["state"] != "ready":
        assert time.monotonic() < deadline + 30
        time.sleep(0.02)
    assert (facts["loading"], engine_is_down(facts)) == (False, False)

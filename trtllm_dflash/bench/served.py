"""Load on a served endpoint: Triton's ``generate_stream``, or any OpenAI-compatible ``/v1`` (vLLM, SGLang, …)."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_dflash.bench.endpoints import Endpoint
from trtllm_dflash.bench.records import RequestRecord, digest_of
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import ConfigError, EngineError, RequestError
from trtllm_dflash.serving.client import TritonClient, TritonHttpError, token_ids
from trtllm_dflash.serving.request_inputs import AS_MANY_AS_FIT
from trtllm_dflash.serving.server_url import split_url
from trtllm_dflash.serving.triton_errors import PORTS

Api = Literal["triton", "openai"]

TIMEOUT_S = 600.0
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class ServedModel:
    """What answers at a URL: ``api``, root ``url`` (no path) and ``model`` name."""

    api: Api
    url: str
    model: str


def find_served_model(url: str, *, api: Api | None = None, model: str | None = None) -> ServedModel:
    """Ask ``url`` what it serves.

    Args:
        url: ``http://host:port``; a path such as ``/v1`` is ignored. api: None asks for both kinds.
        model: None takes the only one (Triton) or the first (OpenAI).

    Raises:
        ConfigError: nothing answers there, or not as either kind; or Triton has several models and none was named.
    """
    root = split_url(url).root
    try:
        if api != "openai" and _request(root, "GET", "/v2/health/live")[0] == 200:
            return ServedModel("triton", root, model or _only_triton_model(root))
        if api != "triton":
            status, body = _request(root, "GET", "/v1/models")
            if status == 200 and isinstance(body, dict) and body.get("data"):
                return ServedModel("openai", root, model or str(body["data"][0]["id"]))
    except OSError as error:
        raise ConfigError(
            f"{root}: nothing answers: {error}", hint="start the server, or check host and port"
        ) from error
    except http.client.HTTPException as error:
        raise ConfigError(
            f"{root}: what answers there does not speak HTTP ({type(error).__name__})",
            hint=PORTS,
        ) from error
    wanted = {
        "triton": "Triton's /v2/health/live",
        "openai": "OpenAI's /v1/models",
        None: "/v2/health/live or /v1/models",
    }
    raise ConfigError(
        f"{root}: something answers there, but not to {wanted[api]}", hint="check the port, or give --api"
    )


def open_endpoint(served: ServedModel) -> Endpoint:
    """The endpoint that sends load to ``served``."""
    return TritonEndpoint(served) if served.api == "triton" else OpenAIEndpoint(served)


class TritonEndpoint:
    """Triton's ``generate_stream`` with this toolkit's tensors. Prompts are token ids or text."""

    def __init__(self, served: ServedModel) -> None:
        self._client = TritonClient(served.url, served.model, timeout_s=TIMEOUT_S)

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        """See :class:`~trtllm_dflash.bench.endpoints.Endpoint`."""
        inputs: dict[str, object] = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        inputs |= _triton_inputs(params)
        tokens: list[int] = []
        last: Mapping[str, object] = {}
        record.start = time.perf_counter()
        try:
            # closing: an abandoned generator would keep its connection, and so its request, until it is collected.
            with closing(self._client.generate_stream(None, **inputs)) as events:  # type: ignore[type-var]
                for event in events:
                    new = token_ids(event)
                    if new:
                        record.events.append((time.perf_counter(), len(new)))
                        tokens += new
                    last = event
                    if stop.is_set():
                        break
        except (TritonHttpError, OSError) as error:
            record.error = str(error)
        record.end = time.perf_counter()
        record.prompt_tokens = None if isinstance(prompt, str) else len(prompt)
        record.digest = digest_of(tokens)
        if "finish_reason" in last:
            record.finish_reason = str(last["finish_reason"])
            record.completion_tokens = len(tokens)
            metrics = json.loads(str(last.get("request_metrics", "{}")))
            record.accepted = int(metrics.get("accepted_tokens", 0))
            record.drafted = int(metrics.get("drafted_tokens", 0))
            record.cycles = int(metrics.get("cycles", 0))
            record.histogram = tuple(map(int, metrics.get("accepted_histogram", ()))) or None
            record.is_cut = any(str(text).startswith("max_tokens:") for text in metrics.get("warnings", ()))

    def stop_all(self) -> None:
        """Streams look at their ``stop`` after every event, and leaving one closes its connection."""


class OpenAIEndpoint:
    """``/v1/chat/completions`` (chat messages) or ``/v1/completions`` (text or token ids), streamed with usage.

    Events of such a stream do not say how many tokens they bring: the total of ``usage`` is spread over them evenly.
    """

    def __init__(self, served: ServedModel) -> None:
        self._url, self._model = served.url, served.model

    def run(self, prompt: Any, params: SamplingParams, record: RequestRecord, stop: threading.Event) -> None:
        """See :class:`~trtllm_dflash.bench.endpoints.Endpoint`."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = chat_payload(self._model, prompt, params) if chat else _completion_payload(self._model, prompt, params)
        texts: list[str] = []
        record.start = time.perf_counter()
        try:
            with closing(_server_sent_events(self._url, path, body)) as events:  # type: ignore[type-var]
                for event in events:
                    text = _openai_text(event, record)
                    if text:
                        record.events.append((time.perf_counter(), 1))
                        texts.append(text)
                    _read_usage(event, record)
                    if stop.is_set():
                        break
        except (EngineError, OSError) as error:
            record.error = str(error)
        except http.client.HTTPException as error:
            record.error = f"the connection was lost ({type(error).__name__})"
        # A stream that was left was in flight until now, whenever its last event came.
        is_whole = bool(record.events) and record.finish_reason is not None and record.error is None
        record.end = record.events[-1][0] if is_whole else time.perf_counter()
        if record.completion_tokens is not None:
            record.spread_evenly(record.completion_tokens)
        elif record.finish_reason is not None:
            record.completion_tokens = len(record.events)
        record.digest = digest_of("".join(texts))

    def stop_all(self) -> None:
        """Streams look at their ``stop`` after every event, and leaving one closes its connection."""


def chat_payload(model: str, messages: Any, params: SamplingParams) -> dict[str, object]:
    """The body of a streamed ``/v1/chat/completions`` request."""
    return {"model": model, "messages": list(messages), **_STREAMED, **_openai_fields(params)}


def _completion_payload(model: str, prompt: Any, params: SamplingParams) -> dict[str, object]:
    text_or_ids = prompt if isinstance(prompt, str) else list(prompt)
    return {"model": model, "prompt": text_or_ids, **_STREAMED, **_openai_fields(params)}


def _triton_inputs(params: SamplingParams) -> dict[str, object]:
    for name, value in (("max_tokens", params.max_tokens), ("top_k", params.top_k)):
        if value is not None and value > AS_MANY_AS_FIT:
            # Triton cuts integers to 32 bits without a word: 4294967297 would be 1.
            raise RequestError(name, value, f"at most {AS_MANY_AS_FIT}, the largest number that Triton takes")
    # None asks for what fits, and so does Triton's largest number.
    most = AS_MANY_AS_FIT if params.max_tokens is None else params.max_tokens
    inputs: dict[str, object] = {"max_tokens": most, "temperature": params.temperature}
    optional: dict[str, tuple[object, object]] = {
        "top_p": (params.top_p, 1.0),
        "top_k": (params.top_k, 0),
        "min_p": (params.min_p, 0.0),
        "seed": (params.seed, None),
        "ignore_eos": (params.ignore_eos, False),
        "stop_words": (list(params.stop), []),
    }
    return inputs | {name: value for name, (value, default) in optional.items() if value != default}


def _openai_fields(params: SamplingParams) -> dict[str, object]:
    fields: dict[str, object] = {"max_tokens": params.max_tokens, "temperature": params.temperature}
    # top_k, min_p and ignore_eos are extensions that vLLM, SGLang and trtllm-serve share; sent only when asked for.
    optional: dict[str, tuple[object, object]] = {
        "top_p": (params.top_p, 1.0),
        "top_k": (params.top_k, 0),
        "min_p": (params.min_p, 0.0),
        "seed": (params.seed, None),
        "ignore_eos": (params.ignore_eos, False),
        "stop": (list(params.stop), []),
    }
    return fields | {name: value for name, (value, default) in optional.items() if value != default}


def _openai_text(event: Mapping[str, Any], record: RequestRecord) -> str:
    texts = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # Reasoning parsers put the thinking of a model beside its answer; both are tokens that were waited for.
        texts += [delta.get("reasoning_content") or "", delta.get("content") or "", choice.get("text") or ""]
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    return "".join(texts)


def _read_usage(event: Mapping[str, Any], record: RequestRecord) -> None:
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.prompt_tokens = usage.get("prompt_tokens")
        record.completion_tokens = usage.get("completion_tokens")
    # vLLM's shape of per-request speculative metrics, at the root of the last event.
    speculative = (event.get("metrics") or {}).get("speculative_decoding")
    if isinstance(speculative, dict):
        record.cycles = speculative.get("num_spec_steps")
        record.drafted = speculative.get("num_draft_tokens")
        record.accepted = speculative.get("num_accepted_draft_tokens")
        counts = speculative.get("acceptance_histogram")
        if isinstance(counts, dict) and counts:
            known = {int(kept): int(count) for kept, count in counts.items()}
            record.histogram = tuple(known.get(kept, 0) for kept in range(max(known) + 1))
        elif isinstance(counts, list) and counts:
            record.histogram = tuple(int(count) for count in counts)


def _server_sent_events(url: str, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    connection = _connect(url, TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"HTTP {response.status}: " + response.read().decode(errors="replace")[:500])
        for line in response:
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:  # the server was killed inside a line
                break
            if "error" in event:
                raise EngineError(str(event["error"])[:500])
            yield event
        # http.client takes a cut connection for the end of a chunked body.
        raise EngineError("the connection was lost before [DONE]")
    finally:
        connection.close()


def _only_triton_model(root: str) -> str:
    status, index = _request(root, "POST", "/v2/repository/index")
    if status != 200 or not isinstance(index, list):
        # Triton's metrics port says that it is alive too.
        raise ConfigError(f"{root}: something answers there, but does not list models (HTTP {status})", hint=PORTS)
    ready = sorted({str(entry["name"]) for entry in index if entry.get("state") == "READY"})
    if not ready:
        raise ConfigError(
            f"{root}: Triton has no model that is ready",
            hint="wait until its model is loaded (trtllm-dflash serve says when), or read the server's log",
        )
    if len(ready) != 1:
        raise ConfigError(
            f"{root}: Triton serves {len(ready)} ready models ({', '.join(ready)}), expected one",
            hint="name it with --model",
        )
    return ready[0]


def _request(root: str, method: str, path: str) -> tuple[int, Any]:
    connection = _connect(root, 10.0)
    try:
        connection.request(method, path, "{}" if method == "POST" else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(raw) if raw else None
    except ValueError:
        return response.status, None


def _connect(root: str, timeout_s: float) -> http.client.HTTPConnection:
    server = split_url(root)
    kind = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    return kind(server.host, server.port, timeout=timeout_s)

"""A small client of Triton's ``generate`` and ``generate_stream``, standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

from trtllm_dflash.errors import DFlashError, EngineError
from trtllm_dflash.serving.server_url import split_url
from trtllm_dflash.serving.triton_errors import no_answer, request_failure


class TritonHttpError(DFlashError):
    """The server answered with an error; the message says what it means, the hint what to do next.

    Attributes:
        status: HTTP status (200 when the error came after the first event of a stream). text: the server's own words.
    """

    def __init__(self, status: int, text: str, *, url: str = "the server", model: str = "dflash") -> None:
        meaning = request_failure(status, text, url=url, model=model)
        super().__init__(meaning.message, hint=meaning.hint)
        self.status = status
        self.text = text
        self.exit_code = 2 if meaning.is_the_requests else 1


class TritonUnreachableError(EngineError, ConnectionError):
    """No answer: nothing listens there, it is not HTTP, it took too long, or the connection was lost."""


class TritonClient:
    """Requests to one model of one server.

    Args:
        url: ``http://host:port``. model: the model's name. timeout_s: longest silence of the server.

    Raises:
        ConfigError: ``url`` is something else.
    """

    def __init__(self, url: str, model: str = "dflash", *, timeout_s: float = 120.0) -> None:
        self.url = url
        self._server = split_url(url)
        self._model, self._timeout_s = model, timeout_s

    def generate(self, text_input: str | None = None, **inputs: object) -> dict[str, object]:
        """One request, one answer: the output tensors by name.

        Raises ``TritonHttpError``, and ``TritonUnreachableError`` (an ``OSError`` too) without an answer.
        """
        status, body = self._post("generate", _payload(text_input, inputs))
        if status != 200 or "error" in body:
            raise self._error(status, str(body.get("error", body)))
        return body

    def generate_stream(self, text_input: str | None = None, **inputs: object) -> Iterator[dict[str, object]]:
        """Events of a streamed request, each the output tensors by name; leaving the iterator closes the connection.

        Raises ``TritonHttpError`` for an error before or inside the stream, else as :meth:`generate`.
        """
        with self._connected() as connection:
            payload = json.dumps({"stream": True, **_payload(text_input, inputs)})
            connection.request("POST", self._path("generate_stream"), payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            finished = False
            for line in response:
                data = line.strip()
                if data.startswith(b"{"):  # an error without event framing
                    data = b"data: " + data
                if not data.startswith(b"data: "):
                    continue
                try:
                    event = json.loads(data[len(b"data: ") :])
                except ValueError:  # the server was killed inside a line
                    break
                if "error" in event:
                    raise self._error(response.status, str(event["error"]))
                finished = "finish_reason" in event
                yield event
            if not finished and response.status != 200:
                raise self._error(response.status, response.reason)
            if not finished:
                # http.client takes a cut connection for the end of a chunked body.
                raise self._error(response.status, "the connection was lost before the last event")

    def health(self) -> dict[str, object]:
        """What the proxy knows of its engine: state, restarts, engine_pid, in_flight, stats. Raises as ``generate``."""
        return dict(json.loads(str(self.generate(control="health")["text_output"])))

    def ready(self) -> bool:
        """Whether ``/v2/health/ready`` says so."""
        try:
            return self.get("/v2/health/ready")[0] == 200
        except OSError:
            return False

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        with self._connected() as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def repository_request(self, action: str) -> tuple[int, object]:
        """``load`` or ``unload`` the model, or ask for the repository's ``index``: (status, parsed body or None)."""
        path = "/v2/repository/index" if action == "index" else f"/v2/repository/models/{self._model}/{action}"
        return self._post_to(path, {})

    def _post(self, action: str, payload: dict[str, object]) -> tuple[int, dict[str, object]]:
        status, body = self._post_to(self._path(action), payload)
        return status, body if isinstance(body, dict) else {"error": "an empty answer" if body is None else str(body)}

    def _post_to(self, path: str, payload: dict[str, object]) -> tuple[int, object]:
        with self._connected() as connection:
            connection.request("POST", path, json.dumps(payload), {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        try:
            return response.status, json.loads(raw) if raw else None
        except ValueError:
            return response.status, {"error": raw.decode(errors="replace").strip()}

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        # One connection per request: an idle kept-alive one would hold up the server's stop.
        kind = http.client.HTTPSConnection if self._server.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._server.host, self._server.port, timeout=self._timeout_s)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            meaning = no_answer(error, url=self.url, timeout_s=self._timeout_s)
            raise TritonUnreachableError(meaning.message, hint=meaning.hint) from error
        finally:
            connection.close()

    def _error(self, status: int, text: str) -> TritonHttpError:
        return TritonHttpError(status, text, url=self.url, model=self._model)

    def _path(self, action: str) -> str:
        return f"/v2/models/{self._model}/{action}"


def token_ids(event: dict[str, object]) -> list[int]:
    """The token ids of an event: Triton writes a list of one as the bare number, and an empty list as nothing."""
    value = event.get("token_ids", [])
    return [int(item) for item in value] if isinstance(value, list) else [int(str(value))]


def _payload(text_input: str | None, inputs: dict[str, object]) -> dict[str, object]:
    return inputs if text_input is None else {"text_input": text_input, **inputs}

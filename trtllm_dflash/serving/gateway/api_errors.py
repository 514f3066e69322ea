"""Errors as OpenAI's clients know them, and what a Triton answer means in these terms."""

from __future__ import annotations

import re
from http import HTTPStatus

from trtllm_dflash.serving.path_redaction import without_paths

CLIENT_CLOSED = 499
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_RETRY = re.compile(r"try again in (\d+) s")
_CODED = re.compile(r"^([A-Z_]+): (.*)$", re.DOTALL)

# Triton's input names → the request's own.
_FIELD_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "chat_messages": "messages",
    "chat_tools": "tools",
    "stop_words": "stop",
    "top_log_probs": "top_logprobs",
    "return_log_probs": "top_logprobs",
    "guided_decoding_guide": "response_format",
    "guided_decoding_guide_type": "response_format",
}
_FIELD = re.compile(r"^([a-z_]+): got ")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status. message: for the client; no paths, no internals. param: the field at fault.
        code: a word for programs. retry_after_s: when to try again, seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, param: str, name: str) -> ApiError:
        """The same error, of the field ``name`` where it is about ``param``: some fields have two names."""
        if self.param != param:
            return self
        message = name + self.message.removeprefix(param) if self.message.startswith(f"{param}:") else self.message
        return ApiError(self.status, message, param=name, code=self.code, retry_after_s=self.retry_after_s)

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def shutting_down() -> ApiError:
    """The server is about to end: for requests that it does not take any more, or cannot finish."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def http_error(status: int) -> ApiError:
    """An error of the HTTP layer itself: unknown path, wrong method."""
    return ApiError(status, HTTPStatus(status).phrase.lower(), code=HTTPStatus(status).phrase.lower().replace(" ", "_"))


def from_triton(status: int, text: str) -> ApiError:
    """What an error of the Triton model means.

    Args:
        status: HTTP status of Triton's answer; 400 whatever happened, when the model itself answered.
        text: the message. The proxy model starts it with a status word; anything else is Triton's own and stays here.
    """
    match = _CODED.match(text)
    code, message = (match[1], match[2]) if match else ("", "")
    if code == "INVALID_ARGUMENT":
        param = None
        if field := _FIELD.match(message):
            param = _FIELD_NAMES.get(field[1], field[1])
            message = f"{param}{message[len(field[1]) :]}"
        # The word by which OpenAI's clients tell that a shorter request would do.
        too_long = "maximum context length" in message
        code = "context_length_exceeded" if too_long else "invalid_value"
        return ApiError(400, without_paths(message), param=param, code=code)
    if code == "UNAVAILABLE":
        retry = _RETRY.search(message)
        if message.startswith("queue:"):
            return ApiError(
                429, without_paths(message), code="queue_full", retry_after_s=max(1, int(retry[1])) if retry else 1
            )
        return ApiError(503, without_paths(message), code="engine_unavailable", retry_after_s=5)
    if code == "DEADLINE_EXCEEDED":
        return ApiError(504, without_paths(message), param="deadline_s", code="deadline_exceeded")
    if code == "CANCELLED":
        return ApiError(CLIENT_CLOSED, "the request was cancelled", code="cancelled")
    if code == "INTERNAL":
        return ApiError(500, without_paths(message), code="engine_error")
    if status == 404 or "is not healthy" in text or "not ready" in text or "unknown model" in text.lower():
        return ApiError(503, "the model is not ready", code="engine_unavailable", retry_after_s=5)
    return ApiError(502, "the model server answered with an error; see its log", code="engine_error")

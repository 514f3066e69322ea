"""The HTTP application: paths, authentication, limits, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from trtllm_dflash.serving.gateway.answers import Answer, ChatShape, CompletionShape, Shape
from trtllm_dflash.serving.gateway.api_errors import CLIENT_CLOSED, ApiError, http_error, shutting_down
from trtllm_dflash.serving.gateway.early_end import EarlyEnd
from trtllm_dflash.serving.gateway.gateway_metrics import GatewayMetrics
from trtllm_dflash.serving.gateway.generation import EventStream, answer_when_done, unless_left
from trtllm_dflash.serving.gateway.replicas import ReplicaPool
from trtllm_dflash.serving.gateway.schema import ChatBody, CompletionBody, parse_body
from trtllm_dflash.serving.gateway.settings import MAX_TRITON_BODY_BYTES, GatewaySettings
from trtllm_dflash.serving.gateway.triton_inputs import echoed_characters, inputs_of

_log = logging.getLogger("trtllm_dflash.gateway")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LINGER_BYTES = 16 << 20
Handler = Callable[[Request], Awaitable[Response]]


class Gateway:
    """The application and its state.

    Args:
        settings: see there.

    Attributes:
        app: the ASGI application. draining: no new request is taken. in_flight: requests being answered.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.pool = ReplicaPool(
            settings.triton_urls, settings.triton_model, silence_timeout_s=settings.silence_timeout_s
        )
        self.metrics = GatewayMetrics(self.pool.replicas)
        self.draining = False
        self.in_flight = 0
        self._early_ends: set[EarlyEnd] = set()
        self._began = int(time.time())
        # No pages of documentation: they load scripts from elsewhere, and the API is OpenAI's.
        self.app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=self._lifespan)
        self.app.add_exception_handler(ApiError, _api_error)
        self.app.add_exception_handler(HTTPException, _http_error)
        route = self.app.add_api_route
        route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"], response_model=None)
        route("/v1/completions", self._guarded(self._completions), methods=["POST"], response_model=None)
        route("/v1/models", self._models, methods=["GET"], response_model=None)
        route("/v1/models/{name:path}", self._model, methods=["GET"], response_model=None)
        route("/health", self._ready, methods=["GET"], response_model=None)
        route("/health/ready", self._ready, methods=["GET"], response_model=None)
        route("/health/live", self._live, methods=["GET"], response_model=None)
        route("/metrics", self._metrics, methods=["GET"], response_model=None)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await self.pool.start()
        try:
            yield
        finally:
            await self.pool.close()

    def cut(self) -> None:
        """End every request that is being answered, each with an error that its client is told of."""
        self.draining = True
        for early_end in list(self._early_ends):
            early_end.end(shutting_down())

    # ---- generation

    async def _chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self._body(request))
        try:
            return await self._generate(request, body, ChatShape(), logprobs=bool(body.logprobs), prompts=1)
        except ApiError as error:
            if body.max_completion_tokens is None:
                raise
            raise error.renamed("max_tokens", "max_completion_tokens") from None

    async def _completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await self._body(request))
        prompt = body.prompt
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        return await self._generate(
            request, body, CompletionShape(), logprobs=body.logprobs is not None, prompts=prompts
        )

    async def _generate(
        self, request: Request, body: ChatBody | CompletionBody, shape: Shape, *, logprobs: bool, prompts: int
    ) -> Response:
        settings = self.settings
        if body.model not in settings.served_names:
            raise _no_such_model(body.model)
        # More than the replicas can ever hold would be told to try again for ever.
        capacity = self.pool.capacity
        most = settings.max_choices if capacity is None else min(settings.max_choices, capacity)
        several = inputs_of(body, max_choices=most)
        for inputs in several:
            size = sum(len(value.encode()) for value in inputs.values() if isinstance(value, str))
            if size > MAX_TRITON_BODY_BYTES // 2:
                raise ApiError(413, "the prompt is too large", param="prompt", code="request_too_large")
        answer = Answer(
            shape,
            identity=shape.prefix + uuid.uuid4().hex,
            model=body.model,
            logprobs=logprobs,
            choices=len(several),
            prompts=prompts,
            echoed=[echoed_characters(inputs) for inputs in several],
        )
        request.state.facts = {"completion_id": answer.identity, "choices": len(several)}
        events = EventStream(self.pool, several, answer)
        early_end: EarlyEnd = request.state.early_end
        early_end.on_end(events.end)
        if body.deadline_s is not None:
            elapsed_s = time.perf_counter() - request.state.began
            early_end.end_at_deadline(body.deadline_s, elapsed_s=elapsed_s)
        if not body.stream:
            return await answer_when_done(request, events, on_first=self._first_output(request))
        # The first event first: a refusal then still has its own status.
        await unless_left(request.receive, events.begin())
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return events.response(
            include_usage=include_usage, on_first=self._first_output(request), on_end=self._end_of_stream(request)
        )

    async def _body(self, request: Request) -> bytes:
        """The body, never more of it than allowed.

        A larger one is read on for a while and thrown away: a client that is still sending when the connection closes
        would see that, and not the answer.
        """
        limit = self.settings.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes, the limit of this server", code="request_too_large"
        )

        async def read() -> bytes:
            raw = bytearray()
            size = 0
            async for block in request.stream():
                size += len(block)
                if size <= limit:
                    raw += block
                elif size > limit + LINGER_BYTES:
                    break
            if size > limit:
                raise too_large
            return bytes(raw)

        try:
            early_end: EarlyEnd = request.state.early_end
            return await early_end.unless_ended(asyncio.wait_for(read(), self.settings.body_timeout_s))
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED, "the client closed the connection", code="client_closed") from None

    # ---- facts

    async def _models(self, request: Request) -> Response:
        self._authenticate(request)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.settings.served_names]})

    async def _model(self, request: Request, name: str) -> Response:
        self._authenticate(request)
        if name not in self.settings.served_names:
            raise _no_such_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        known = [replica.facts["limits"] for replica in self.pool.replicas if replica.facts.get("limits")]
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "trtllm-dflash",
            "max_model_len": known[0].get("max_seq_len") if known else None,
        }

    async def _ready(self, request: Request) -> Response:
        ready = self.pool.ready and not self.draining
        states = [replica.state for replica in self.pool.replicas]
        status = "draining" if self.draining else "ready" if ready else "not ready"
        return JSONResponse({"status": status, "replicas": states}, status_code=200 if ready else 503)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- around every generation

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            state = request.state
            state.began = time.perf_counter()
            state.facts = {}
            state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            headers = {"x-request-id": state.request_id}
            try:
                self._authenticate(request)
            except ApiError as error:
                return self._ended(request, error, headers)
            if self.draining:
                headers["connection"] = "close"
                return self._ended(request, shutting_down(), headers)
            if self.in_flight >= self.settings.max_in_flight:
                text = f"queue: {self.in_flight} requests are being answered, the limit of this server"
                return self._ended(request, ApiError(429, text, code="queue_full", retry_after_s=1), headers)
            self.in_flight += 1
            self.metrics.in_flight.inc()
            state.early_end = EarlyEnd()
            self._early_ends.add(state.early_end)
            streaming = False
            try:
                response = await handler(request)
                response.headers["x-request-id"] = state.request_id
                streaming = bool(getattr(response, "streams", False))
                if not streaming:
                    self._count(request, response.status_code)
                return response
            except ApiError as error:
                return self._ended(request, error, headers)
            except Exception:
                _log.exception("request %s failed in the front end", state.request_id)
                text = "the front end failed on this request; see its log"
                return self._ended(request, ApiError(500, text, code="internal_error"), headers)
            finally:
                if not streaming:
                    self._left(request)

        return guarded

    def _ended(self, request: Request, error: ApiError, headers: dict[str, str]) -> Response:
        self._count(request, error.status, error)
        return JSONResponse(error.body(), status_code=error.status, headers={**error.headers(), **headers})

    def _first_output(self, request: Request) -> Callable[[], None]:
        def first() -> None:
            seconds = time.perf_counter() - request.state.began
            request.state.facts["first_token_s"] = round(seconds, 4)
            self.metrics.first_token.observe(seconds)

        return first

    def _end_of_stream(self, request: Request) -> Callable[[Answer, int, ApiError | None], None]:
        def end(answer: Answer, status: int, error: ApiError | None) -> None:
            request.state.facts["completion_tokens"] = sum(choice.tokens for choice in answer.choices)
            self._count(request, status, error)
            self._left(request)

        return end

    def _left(self, request: Request) -> None:
        request.state.early_end.forget()
        self._early_ends.discard(request.state.early_end)
        self.in_flight -= 1
        self.metrics.in_flight.dec()

    def _count(self, request: Request, status: int, error: ApiError | None = None) -> None:
        seconds = time.perf_counter() - request.state.began
        path = request.url.path
        self.metrics.requests.labels(path=path, status=str(status)).inc()
        self.metrics.duration.observe(seconds)
        facts = {"request_id": request.state.request_id, "path": path, "status": status, **request.state.facts}
        if error is not None:
            facts["error"] = error.message[:200]
        _log.info("%s %d", path, status, extra={"request": {**facts, "elapsed_s": round(seconds, 4)}})

    def _authenticate(self, request: Request) -> None:
        hashes = self.settings.api_key_hashes
        if not hashes:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, in constant time each: the time says nothing about which one was close.
        matches = [hmac.compare_digest(digest, known) for known in hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")


def _no_such_model(name: str) -> ApiError:
    return ApiError(404, f"model: {name[:100]!r} is not served here", param="model", code="model_not_found")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _api_error(request, http_error(error.status_code))

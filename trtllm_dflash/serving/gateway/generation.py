"""From the events of one or several Triton streams to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from trtllm_dflash.serving.gateway.answers import Answer
from trtllm_dflash.serving.gateway.api_errors import CLIENT_CLOSED, ApiError, shutting_down
from trtllm_dflash.serving.gateway.replicas import ReplicaPool

Event = tuple[int, dict[str, Any]]
Result = TypeVar("Result")
OnEnd = Callable[[Answer, int, ApiError | None], None]
# More than a client that reads slowly can make us hold, per sequence.
_QUEUE_EVENTS = 256


class EventStream:
    """The events of every sequence of a request, in the order in which they come.

    Args:
        pool: where they run. several: Triton inputs of each sequence. answer: what they become.
    """

    def __init__(self, pool: ReplicaPool, several: Sequence[Mapping[str, Any]], answer: Answer) -> None:
        self.answer = answer
        self._pool = pool
        self._several = several
        self._queue: asyncio.Queue[Event | ApiError | None] = asyncio.Queue(_QUEUE_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(several)
        self._first: list[Event] = []
        self._failure: ApiError | None = None

    def end(self, error: ApiError) -> None:
        """End every sequence now; :meth:`next` raises ``error`` instead of waiting for the model server."""
        self._failure = error
        for task in self._tasks:
            task.cancel()
        if self._queue.empty():  # else nobody waits for it
            self._queue.put_nowait(error)

    async def begin(self) -> None:
        """Start every sequence and wait for the first event; raises ``ApiError`` when it is a refusal."""
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._several))]
        try:
            if (batch := await self.next()) is not None:
                self._first = batch
        except BaseException:
            await self.close()
            raise

    async def next(self) -> list[Event] | None:
        """Events that are there, at least one; None after the last. Raises ``ApiError``."""
        if self._first:
            batch, self._first = self._first, []
            return batch
        batch = []
        while self._running and not batch:
            if self._failure is not None:
                raise self._failure
            item = await self._queue.get()
            while True:
                if item is None:
                    self._running -= 1
                elif isinstance(item, ApiError):
                    if batch:  # first what came before it
                        self._failure = item
                        return batch
                    raise item
                else:
                    batch.append(item)
                if self._queue.empty():
                    break
                item = self._queue.get_nowait()
        return batch or None

    async def close(self) -> None:
        """End what still runs; the engine gives their slots and pages back."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def response(self, *, include_usage: bool, on_first: Callable[[], None], on_end: OnEnd) -> Response:
        """A streaming response, after :meth:`begin`."""
        return _SseResponse(self, include_usage, on_first, on_end)

    async def _run(self, index: int) -> None:
        identity = self.answer.identity if len(self._several) == 1 else f"{self.answer.identity}-{index}"
        try:
            async with contextlib.aclosing(self._pool.stream(self._several[index], identity)) as events:
                async for event in events:
                    await self._queue.put((index, event))
            await self._queue.put(None)
        except ApiError as error:
            await self._queue.put(error)
        except Exception as error:
            await self._queue.put(ApiError(500, "the front end failed on this request", code="internal_error"))
            raise error


async def unless_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; a client that closes the connection before ends it with ``ApiError`` 499.

    The request's body must have been read: the next message can then only be that the client has gone.
    """

    async def until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.create_task(work), asyncio.create_task(until_left())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    except OSError:  # the client left while we wrote
        pass
    finally:
        for one in (task, left):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one
    raise ApiError(CLIENT_CLOSED, "the client closed the connection", code="client_closed")


async def answer_when_done(request: Request, events: EventStream, *, on_first: Callable[[], None]) -> Response:
    """The whole answer as one document; a client that leaves before ends the generation (status 499)."""
    answer = events.answer

    async def gather() -> None:
        await events.begin()
        waiting = True
        while (batch := await events.next()) is not None:
            if waiting:
                waiting = False
                on_first()
            for index, event in batch:
                answer.choices[index].add(event)

    try:
        await unless_left(request.receive, gather())
    finally:
        await events.close()
    request.state.facts["completion_tokens"] = sum(choice.tokens for choice in answer.choices)
    return JSONResponse(answer.document())


class _SseResponse(Response):
    """Server-sent events. Written against ASGI itself, because a client's leaving must be seen while nothing is sent:
    a request that waits for its next token is the one to end."""

    streams = True

    def __init__(self, events: EventStream, include_usage: bool, on_first: Callable[[], None], on_end: OnEnd) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would collect the events otherwise
        self._events = events
        self._include_usage = include_usage
        self._on_first = on_first
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, problem = 200, None
        try:
            problem = await unless_left(receive, self._write(send))
            status = problem.status if problem is not None else 200
        except ApiError as error:  # the client left
            status, problem = error.status, error
        except asyncio.CancelledError:  # uvicorn's last resort, for a client that does not even read the error
            problem = shutting_down()
            status = problem.status
            raise
        finally:
            await self._events.close()
            self._on_end(self._events.answer, status, problem)

    async def _write(self, send: Send) -> ApiError | None:
        """Send everything; returns the error that ended the stream early, which the client has been told of."""
        answer, shape = self._events.answer, self._events.answer.shape
        usage = self._include_usage
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        first = [entry for choice in answer.choices if (entry := shape.first(choice.index))]
        pending = b"".join(answer.chunk([entry], with_usage_field=usage) for entry in first)
        waiting = True
        problem: ApiError | None = None
        try:
            while (batch := await self._events.next()) is not None:
                if waiting:
                    waiting = False
                    self._on_first()
                for index, event in batch:
                    choice = answer.choices[index]
                    details = choice.add(event)
                    part = shape.part(choice, event.get("text_output", ""), details, answer.logprobs)
                    pending += answer.chunk([part], with_usage_field=usage)
                await send({"type": "http.response.body", "body": pending, "more_body": True})
                pending = b""
            if usage:
                pending += answer.chunk([], with_usage_field=True, ending=True)
        except ApiError as error:
            problem = error
            pending += f"data: {json.dumps(error.body())}\n\n".encode()
        await send({"type": "http.response.body", "body": pending + b"data: [DONE]\n\n", "more_body": False})
        return problem

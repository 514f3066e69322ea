"""What may end a request although the model server has said nothing: its own deadline, or the end of this server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from trtllm_dflash.serving.gateway.api_errors import ApiError

Result = TypeVar("Result")
# The engine keeps deadlines too and is the first to: its log then has the request's figures.
DEADLINE_SLACK_S = 0.25


class EarlyEnd:
    """The early end of one request, if it comes to that. Lives in the event loop that it was made in.

    Attributes:
        error: how the request ended early, or None so far.
    """

    def __init__(self) -> None:
        self.error: ApiError | None = None
        self._ended = asyncio.Event()
        self._listener: Callable[[ApiError], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end(self, error: ApiError) -> None:
        """End the request with ``error``; only the first end counts."""
        if self.error is None:
            self.error = error
            self._ended.set()
            if self._listener is not None:
                self._listener(error)

    def end_at_deadline(self, deadline_s: float, *, elapsed_s: float) -> None:
        """End it with 504 when it is ``deadline_s`` old, and a little; ``elapsed_s`` of that have passed."""
        error = ApiError(
            504,
            f"the request was not finished within its deadline_s = {deadline_s:g}",
            param="deadline_s",
            code="deadline_exceeded",
        )
        delay_s = max(deadline_s + DEADLINE_SLACK_S - elapsed_s, 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.end, error)

    def on_end(self, listener: Callable[[ApiError], None]) -> None:
        """Tell ``listener`` of the end, at once when it has come already."""
        self._listener = listener
        if self.error is not None:
            listener(self.error)

    def forget(self) -> None:
        """The request has ended in its own way."""
        self._listener = None
        if self._timer is not None:
            self._timer.cancel()

    async def unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``; an early end cancels it and is raised as ``ApiError``."""
        task, ended = asyncio.create_task(work), asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for one in (task, ended):
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await one
        assert self.error is not None
        raise self.error

"""The Triton servers behind the front end: which one is well, which one is least loaded, and streams from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from trtllm_dflash.serving.gateway.api_errors import ApiError, from_triton

POLL_S = 1.0
POLL_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 5.0
Events = AsyncGenerator[dict[str, Any], None]
_log = logging.getLogger(__name__)


class Replica:
    """One Triton server.

    Attributes:
        index: its number, the label in metrics and logs (clients never see the address).
        state: ``ready``, another state of its engine, or ``unreachable``. facts: its last health answer.
        in_flight: sequences that this front end runs there now.
    """

    def __init__(self, index: int, url: str, model: str) -> None:
        self.index = index
        self.state = "unknown"
        self.facts: Mapping[str, Any] = {}
        self.in_flight = 0
        base = f"{url.rstrip('/')}/v2/models/{model}"
        self.generate_url = f"{base}/generate"
        self.stream_url = f"{base}/generate_stream"

    @property
    def capacity(self) -> int | None:
        """Slots and places in the queue; None before it has said so. They stay when it becomes unreachable."""
        slots, places = self.facts.get("limits", {}).get("max_batch_size"), self.facts.get("max_queue")
        return None if slots is None or places is None else int(slots) + int(places)

    @property
    def load(self) -> float:
        """Sequences in flight over slots: what it already runs for others counts too."""
        slots = max(int(self.facts.get("limits", {}).get("max_batch_size", 1)), 1)
        return max(self.in_flight, int(self.facts.get("in_flight", 0))) / slots


class ReplicaPool:
    """Chooses replicas and opens streams. Lives in one event loop; ``start`` and ``close`` belong to it.

    Args:
        urls: of the replicas. model: the model's name there. silence_timeout_s: longest silence within a stream.
    """

    def __init__(self, urls: Sequence[str], model: str, *, silence_timeout_s: float) -> None:
        self.replicas = [Replica(index, url, model) for index, url in enumerate(urls)]
        self._silence_timeout_s = silence_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._poller: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the client and look at every replica once."""
        # force_close: an idle kept-alive connection would hold up the stop of its Triton server.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 18)
        await self._look()
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop looking, drop every connection."""
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        if self._session is not None:
            await self._session.close()

    @property
    def ready(self) -> bool:
        """Whether some replica's engine answers requests now."""
        return any(replica.state == "ready" for replica in self.replicas)

    @property
    def capacity(self) -> int | None:
        """Sequences that all replicas together can ever hold, running and waiting; None while that is not known."""
        each = [replica.capacity for replica in self.replicas]
        known = [capacity for capacity in each if capacity is not None]
        return sum(known) if len(known) == len(each) else None

    def order(self) -> list[Replica]:
        """Replicas to try, best first: ready and least loaded. One whose engine is restarting lets requests wait."""
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        waiting = [replica for replica in self.replicas if replica.state in ("starting", "restarting", "unknown")]
        return sorted(ready, key=lambda replica: (replica.load, replica.index)) or waiting

    async def stream(self, inputs: Mapping[str, Any], identity: str) -> Events:
        """Events of one generation. Leaving the iterator ends the generation and frees what it holds.

        A replica that cannot take the request (gone, full, restarting) is passed over for the next one as long as
        nothing has been generated.

        Args:
            inputs: of the Triton model. identity: unique id, also the name of the request in the engine's log.

        Raises:
            ApiError: refused, no replica, or an error in the middle.
        """
        problem = ApiError(503, "no replica is ready", code="engine_unavailable", retry_after_s=5)
        payload = json.dumps({**inputs, "id": identity}, ensure_ascii=False, separators=(",", ":")).encode()
        for replica in self.order():
            begun = False
            try:
                # aclosing: a generator that is only dropped is cleaned up some time later.
                async with contextlib.aclosing(self._stream_from(replica, payload, identity)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ApiError as error:
                if begun or error.status not in (429, 503):
                    raise
                problem = error
        raise problem

    async def _stream_from(
        self, replica: Replica, payload: bytes, identity: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        finished = False
        replica.in_flight += 1
        try:
            async with self._post(replica, payload) as response:
                async for event in _events(response):
                    if "error" in event:
                        finished = True
                        raise from_triton(response.status, str(event["error"]))
                    finished = "finish_reason" in event
                    yield event
                if not finished:
                    finished = True
                    raise ApiError(503, "the model server closed the connection", code="engine_unavailable")
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as error:
            finished = True
            replica.state = "unreachable"
            _log.warning("replica %d: %s while streaming", replica.index, type(error).__name__)
            raise ApiError(
                503, "the model server does not answer", code="engine_unavailable", retry_after_s=5
            ) from error
        finally:
            replica.in_flight -= 1
            if not finished:
                self._stop(replica, identity)

    @contextlib.asynccontextmanager
    async def _post(self, replica: Replica, payload: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "start() was not called"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._silence_timeout_s)
        response = await self._session.post(
            replica.stream_url, data=payload, headers={"content-type": "application/json"}, timeout=timeout
        )
        try:
            yield response
        finally:
            response.close()  # drops the connection, which is how Triton learns that the client has gone

    def _stop(self, replica: Replica, identity: str) -> None:
        """Triton notices a closed connection only when it writes, a waiting request never does: stop it by its id."""

        async def stop() -> None:
            with contextlib.suppress(Exception):
                await self._generate(replica, {"stop": True, "id": identity})

        task = asyncio.get_running_loop().create_task(stop())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _generate(self, replica: Replica, inputs: Mapping[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "start() was not called"
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
        async with self._session.post(replica.generate_url, json=inputs, timeout=timeout) as response:
            return dict(await response.json(content_type=None))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._look()

    async def _look(self) -> None:
        await asyncio.gather(*map(self._look_at, self.replicas))

    async def _look_at(self, replica: Replica) -> None:
        before, reason = replica.state, ""
        try:
            answer = await self._generate(replica, {"control": "metrics"})
            replica.facts = json.loads(answer["text_output"])
            replica.state = str(replica.facts["state"])
        except Exception as error:
            replica.state, reason = "unreachable", f" ({type(error).__name__})"
        if replica.state != before:
            _log.info("replica %d is %s%s", replica.index, replica.state, reason)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of Triton, parsed; an error body without framing is one event too."""
    if response.status != 200:
        raw = (await response.content.read(1 << 16)).strip()
        for line in raw.splitlines():
            text = line.removeprefix(b"data:").strip()
            if text.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    yield dict(json.loads(text))
                    return
        yield {"error": raw[:200].decode(errors="replace")}
        return
    pending = b""
    async for block in response.content.iter_any():
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield json.loads(line[5:])
    if pending.startswith(b"data:"):
        yield json.loads(pending[5:])

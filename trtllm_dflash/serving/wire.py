"""The messages between Triton's proxy model and the engine process, and how they travel.

``deploy`` copies this file beside the proxy's ``model.py``: Triton's Python stub does not see this package. So it uses
the standard library only and imports nothing of ours. A frame is a 4-byte big-endian length and that many bytes of
UTF-8 JSON, ``{"type": NAME, ...fields}``; one frame is one of the dataclasses below.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field, fields

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20
# The supervisor's own probe: served like any request, but not counted among the clients' requests.
CANARY_ID = "dflash-canary"
_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The other side sent something that is not one of the messages (a broken or foreign peer)."""


# ---- proxy to engine


@dataclass(frozen=True)
class Generate:
    """One request.

    Attributes:
        fields: input name → flat list of values, exactly as the client gave them.
        client_id: the client's own request id, for the log; may be empty and need not be unique.
    """

    id: str
    fields: dict[str, list[object]]
    client_id: str = ""


@dataclass(frozen=True)
class Cancel:
    """The client of ``id`` went away. The engine answers with a last ``Delta`` whose reason is ``cancelled``."""

    id: str


@dataclass(frozen=True)
class Shutdown:
    """Finish nothing, release the device and exit."""


# ---- engine to proxy


@dataclass(frozen=True)
class Ready:
    """The engine is loaded. ``limits`` are those of the engine directory (``BuildLimits`` as a mapping)."""

    protocol: int
    pid: int
    limits: dict[str, int]


@dataclass(frozen=True)
class LoadFailed:
    """The engine cannot be loaded; the process exits after this message. ``permanent``: a restart cannot help."""

    message: str
    permanent: bool


@dataclass(frozen=True)
class Heartbeat:
    """Sent every half second once ready.

    Attributes:
        stats: pages, requests and counters of the engine. stalled_s: seconds since the last progress while there is
            work, or since the message began that is still being taken in, else 0.
        samples: values of ``metric_definitions``' metrics, each ``[sample name, {label: value}, number]``.
    """

    stats: dict[str, int]
    stalled_s: float
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """New output of one request; the last one has ``finish_reason`` set.

    Attributes:
        text, token_ids: what is new. log_probs: natural-log probability per new token, when asked for.
        log_prob_details: per new token its text, bytes and alternatives, when asked for (OpenAI's shape).
        metrics: on the last delta, facts of the whole request: ``RequestMetrics`` as a mapping, ``block_size``, and
        ``warnings`` (texts) where there are any.
    """

    id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    log_prob_details: list[dict[str, object]] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The request ended in an error. ``code`` is a gRPC status word such as ``INVALID_ARGUMENT``."""

    id: str
    code: str
    message: str


Message = Generate | Cancel | Shutdown | Ready | LoadFailed | Heartbeat | Delta | Failed
_TYPES = {kind.__name__: kind for kind in (Generate, Cancel, Shutdown, Ready, LoadFailed, Heartbeat, Delta, Failed)}


def encode(message: Message) -> bytes:
    """One frame. Raises ``WireError`` when the message is larger than ``MAX_FRAME_BYTES``."""
    body = json.dumps({"type": type(message).__name__, **vars(message)}, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} message of {len(body)} bytes, expected at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in one frame's body. Raises ``WireError`` for unknown types and wrong fields."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise WireError(f"frame of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("type") not in _TYPES:
        raise WireError(f"unknown message, expected one of {sorted(_TYPES)}")
    kind = _TYPES[document.pop("type")]
    known = {item.name for item in fields(kind)}
    if not document.keys() <= known:
        raise WireError(f"{kind.__name__}: unknown fields {sorted(document.keys() - known)}")
    try:
        message: Message = kind(**document)
    except TypeError as error:
        raise WireError(f"{kind.__name__}: {error}") from error
    return message


class Connection:
    """Messages over a connected stream socket. ``send`` may be called from any thread, ``receive`` from one."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._reader = stream.makefile("rb")
        self._send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Write one frame; raises ``OSError`` when the peer is gone."""
        frame = encode(message)
        with self._send_lock:
            self._stream.sendall(frame)

    def send_all(self, messages: list[Message]) -> None:
        """Write several frames at once (one system call for all streams of a cycle); raises ``OSError`` as ``send``."""
        frames = b"".join(map(encode, messages))
        with self._send_lock:
            self._stream.sendall(frames)

    def receive(self) -> Message | None:
        """The next message, blocking; None when the peer closed (also in the middle of a frame)."""
        try:
            head = self._reader.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (size,) = _LENGTH.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise WireError(f"frame of {size} bytes, expected at most {MAX_FRAME_BYTES}")
            body = self._reader.read(size)
        except (ConnectionError, ValueError):  # ValueError: closed by ``close`` in another thread
            return None
        return decode(body) if len(body) == size else None

    def close(self) -> None:
        """Wake a blocked ``receive`` and release the socket."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

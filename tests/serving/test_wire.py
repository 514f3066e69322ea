"""Messages survive the socket; broken peers are noticed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dflash.serving import wire

_VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text())


@given(st.text(), st.dictionaries(st.text(), st.lists(_VALUES)))
def test_generate_round_trip(identity: str, fields: dict[str, list[object]]) -> None:
    message = wire.Generate(identity, fields)
    assert wire.decode(wire.encode(message)[4:]) == message


@given(st.text(), st.lists(st.integers(0, 2**31)), st.sampled_from([None, "stop", "length"]))
def test_delta_round_trip(text: str, token_ids: list[int], reason: str | None) -> None:
    message = wire.Delta("1", text, token_ids, [-0.5], [], reason, {"cycles": 3})
    assert wire.decode(wire.encode(message)[4:]) == message


@pytest.fixture
def pair() -> Iterator[tuple[wire.Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = wire.Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_messages_arrive_in_order(pair: tuple[wire.Connection, socket.socket]) -> None:
    connection, peer = pair
    sent = [wire.Delta("a", text="é" * 100_000), wire.Cancel("a"), wire.Failed("b", "INTERNAL", "x")]
    other = wire.Connection(peer)
    for message in sent[1:]:
        other.send(message)
    assert [connection.receive() for _ in sent[1:]] == sent[1:]


def test_closed_peer_ends_receive(pair: tuple[wire.Connection, socket.socket]) -> None:
    connection, peer = pair
    frame = wire.encode(wire.Cancel("a"))
    peer.sendall(frame + frame[: len(frame) // 2])
    peer.close()
    assert connection.receive() == wire.Cancel("a")
    assert connection.receive() is None


@pytest.mark.parametrize(
    "body",
    [b"not json", b"[]", b'{"type":"Nonsense"}', b'{"type":"Cancel"}', b'{"type":"Cancel","id":"1","more":1}'],
)
def test_foreign_messages_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(body)


def test_oversized_frame_is_refused_before_it_is_read(pair: tuple[wire.Connection, socket.socket]) -> None:
    connection, peer = pair
    peer.sendall(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(wire.WireError, match="expected at most"):
        connection.receive()

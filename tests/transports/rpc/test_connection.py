"""What is queued in one connection, how much of it has gone, and whose memory it is."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.wire_pairs import ASKING, SERVED, feed, papers, said

from gossamer.core.peer_ops import Push, Stamp
from gossamer.transports.rpc.connection import Connection, ConnectionClosed, OutgoingMessage
from gossamer.transports.wire.connection_state import ConnectionState, ReceivedFrame
from gossamer.transports.wire.frames import Message
from gossamer.transports.wire.messages import PING, asked


class Taking:
    """A channel that takes as many bytes as it is allowed to, and remembers them."""

    def __init__(self) -> None:
        self.taken, self.allowed, self.waits = bytearray(), 2**40, False
        self.given = b""

    def send(self, buffers: Sequence[memoryview]) -> int:
        if not self.allowed:
            raise BlockingIOError
        data = b"".join(buffers)[: self.allowed]
        self.taken += data
        self.allowed -= len(data)
        return len(data)

    def receive(self, room: memoryview) -> int:
        data, self.given = self.given[: room.nbytes], self.given[room.nbytes :]
        room[: len(data)] = data
        return len(data)

    def is_drained(self, nbytes: int, room: memoryview) -> bool:
        return False

    def waits_to_read(self) -> bool:
        return self.waits


class Rig:
    """A dialling line that has met a listener which is fed by hand."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Taking()
        self.listener = ConnectionState(papers(SERVED))
        self.line = Connection(connection, self.channel, ConnectionState(papers(ASKING), SERVED), SERVED)
        self.line.write()
        self._carry()
        self.channel.given = said(self.listener)
        with pytest.raises(ConnectionClosed):  # nothing more is given
            assert set(self.line.read()) == {None}
        self.line.write()
        self._carry()
        assert self.listener.met is not None

    def heard(self) -> list[ReceivedFrame]:
        return self._carry()

    def _carry(self) -> list[ReceivedFrame]:
        data, self.channel.taken = bytes(self.channel.taken), bytearray()
        return feed(self.listener, data)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with socket.socket() as connection:
        yield Rig(connection)


def push(payload: torch.Tensor, step: int = 0) -> Message:
    return asked(Push(to=SERVED, key="", stamp=Stamp(0, step), payload=(payload,)), step)


def test_parcels_leave_in_order_however_little_is_taken_at_once(rig: Rig) -> None:
    rig.channel.allowed = 0
    parcels = [rig.line.send(push(torch.full((50,), step), step)) for step in range(40)]
    assert rig.line.queued_bytes == sum(parcel.message.frame_bytes for parcel in parcels)
    gone: list[OutgoingMessage] = []
    while len(gone) < 40:
        assert rig.line.wants_to_write
        rig.channel.allowed = 77
        gone += rig.line.write()
    assert gone == parcels
    assert rig.line.queued_bytes == 0
    assert rig.line.is_silent
    assert [each.payload[0][0].item() for each in rig.heard()] == list(range(40))


def check_memory_is_given_back(rig: Rig) -> None:
    x = torch.arange(1000.0)
    parcel = rig.line.send(push(x))
    rig.channel.allowed = 2000
    assert rig.line.write() == []
    rig.line.take_back(parcel)
    x.fill_(-1)
    rig.channel.allowed = 2**40
    assert rig.line.write() == [parcel]
    (spoken,) = rig.heard()
    assert torch.equal(spoken.payload[0], torch.arange(1000.0))


def test_what_is_half_sent_goes_on_from_a_copy(rig: Rig) -> None:
    check_memory_is_given_back(rig)


def test_without_a_copy_the_listener_would_notice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutgoingMessage, "give_back_memory", lambda parcel: None)
    with pytest.raises(Exception, match="do not match their checksum"):
        check_memory_is_given_back(rig)


def test_what_was_not_begun_is_not_sent(rig: Rig) -> None:
    rig.channel.allowed = 0
    first, second = rig.line.send(push(torch.ones(5))), rig.line.send(PING)
    rig.line.take_back(first)
    assert rig.line.queued_bytes == second.message.frame_bytes
    rig.channel.allowed = 2**40
    assert rig.line.write() == [second]
    assert [each.payload for each in rig.heard()] == [()]


def test_a_channel_that_waits_to_read_is_not_asked_to_write(rig: Rig) -> None:
    rig.line.send(PING)
    rig.channel.waits = True
    assert not rig.line.wants_to_write


@pytest.mark.parametrize("act", [lambda rig: rig.line.write(), lambda rig: list(rig.line.read())], ids=["out", "in"])
def test_a_broken_channel_is_closed(rig: Rig, act: Callable[[Rig], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def break_(_: object) -> int:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(rig.channel, "send", break_)
    monkeypatch.setattr(rig.channel, "receive", break_)
    rig.line.send(PING)
    with pytest.raises(ConnectionClosed, match="reset by peer"):
        act(rig)

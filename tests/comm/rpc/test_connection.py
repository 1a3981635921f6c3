"""What is queued in one connection, how much of it has gone, and whose memory it is."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.wire_pairs import ASKING, SERVED, credentials, feed, sent

from gossamer.base.peer_ops import Push, Stamp
from gossamer.comm.rpc.connection import Connection, ConnectionClosed, OutgoingMessage
from gossamer.comm.rpc_protocol.connection_state import ConnectionState, ReceivedFrame
from gossamer.comm.rpc_protocol.frames import Message
from gossamer.comm.rpc_protocol.messages import PING, encode_ask


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

    def receive(self, buffer: memoryview) -> int:
        data, self.given = self.given[: buffer.nbytes], self.given[buffer.nbytes :]
        buffer[: len(data)] = data
        return len(data)

    def is_drained(self, nbytes: int, buffer: memoryview) -> bool:
        return False

    def needs_read_first(self) -> bool:
        return self.waits


class Rig:
    """A dialing connection that has authenticated to a listener which is fed by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Taking()
        self.listener = ConnectionState(credentials(SERVED))
        self.connection = Connection(sock, self.channel, ConnectionState(credentials(ASKING), SERVED), SERVED)
        for _ in range(2):
            self.channel.given = sent(self.listener)
            with pytest.raises(ConnectionClosed):  # nothing more is given
                assert set(self.connection.read()) == {None}
            self.connection.write()
            self._carry()
        assert self.listener.authenticated is not None

    def heard(self) -> list[ReceivedFrame]:
        return self._carry()

    def _carry(self) -> list[ReceivedFrame]:
        data, self.channel.taken = bytes(self.channel.taken), bytearray()
        return feed(self.listener, data)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with socket.socket() as sock:
        yield Rig(sock)


def push(payload: torch.Tensor, step: int = 0) -> Message:
    return encode_ask(Push(to=SERVED, key="", stamp=Stamp(0, step), payload=(payload,)), step)


def test_messages_leave_in_order_however_little_is_taken_at_once(rig: Rig) -> None:
    rig.channel.allowed = 0
    queued = [rig.connection.send(push(torch.full((50,), step), step)) for step in range(40)]
    assert rig.connection.queued_bytes == sum(outgoing.message.frame_bytes for outgoing in queued)
    sent: list[OutgoingMessage] = []
    while len(sent) < 40:
        assert rig.connection.wants_to_write
        rig.channel.allowed = 77
        sent += rig.connection.write()
    assert sent == queued
    assert rig.connection.queued_bytes == 0
    assert rig.connection.is_idle
    assert [each.payload[0][0].item() for each in rig.heard()] == list(range(40))


def check_memory_is_given_back(rig: Rig) -> None:
    x = torch.arange(1000.0)
    outgoing = rig.connection.send(push(x))
    rig.channel.allowed = 2000
    assert rig.connection.write() == []
    rig.connection.withdraw(outgoing)
    x.fill_(-1)
    rig.channel.allowed = 2**40
    assert rig.connection.write() == [outgoing]
    (frame,) = rig.heard()
    assert torch.equal(frame.payload[0], torch.arange(1000.0))


def test_what_is_half_sent_continues_from_a_copy(rig: Rig) -> None:
    check_memory_is_given_back(rig)


def test_without_a_copy_the_listener_would_notice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutgoingMessage, "give_back_memory", lambda outgoing: None)
    with pytest.raises(Exception, match="do not match their checksum"):
        check_memory_is_given_back(rig)


def test_what_was_not_begun_is_not_sent(rig: Rig) -> None:
    rig.channel.allowed = 0
    first, second = rig.connection.send(push(torch.ones(5))), rig.connection.send(PING)
    rig.connection.withdraw(first)
    assert rig.connection.queued_bytes == second.message.frame_bytes
    rig.channel.allowed = 2**40
    assert rig.connection.write() == [second]
    assert [each.payload for each in rig.heard()] == [()]


def test_a_channel_that_waits_to_read_is_not_asked_to_write(rig: Rig) -> None:
    rig.connection.send(PING)
    rig.channel.waits = True
    assert not rig.connection.wants_to_write


@pytest.mark.parametrize(
    "act", [lambda rig: rig.connection.write(), lambda rig: list(rig.connection.read())], ids=["out", "in"]
)
def test_a_broken_channel_is_closed(rig: Rig, act: Callable[[Rig], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def break_(_: object) -> int:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(rig.channel, "send", break_)
    monkeypatch.setattr(rig.channel, "receive", break_)
    rig.connection.send(PING)
    with pytest.raises(ConnectionClosed, match="reset by peer"):
        act(rig)

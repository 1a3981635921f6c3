"""Two ends of a connection in memory, and bytes to feed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gossamer.core.peer_ops import SERVER, WORKER, Peer
from gossamer.transports.wire.authentication import Credentials
from gossamer.transports.wire.connection_state import ConnectionState, ReceivedFrame

SERVED, ASKING = Peer(SERVER, 0), Peer(WORKER, 3)
TOKEN = bytes(range(32))
LIMIT = 2**20
BASE = Credentials(me=ASKING, token=TOKEN, run="run", recipe="Dense()", layout="abcd", largest_frame_bytes=LIMIT)


def papers(me: Peer = ASKING, **other: object) -> Credentials:
    return dataclasses.replace(BASE, me=me, instance=bytes(16), **other)  # type: ignore[arg-type]


def feed(conversation: ConnectionState, data: bytes) -> list[ReceivedFrame]:
    """What is spoken in these bytes, given as they come."""
    spoken, left = [], memoryview(data)
    while left.nbytes:
        room = conversation.room()
        nbytes = min(room.nbytes, left.nbytes)
        room[:nbytes] = left[:nbytes]
        left = left[nbytes:]
        spoken += [heard for heard in conversation.filled(nbytes) if heard is not None]
    return spoken


def said(conversation: ConnectionState) -> bytes:
    return b"".join(conversation.courtesies())


def shake(
    dialler: ConnectionState, listener: ConnectionState, on_the_way: Callable[[bytes], bytes] = lambda data: data
) -> None:
    """Carry what both say until nobody says more; `on_the_way` may change it."""
    while data := said(dialler) + b"":
        feed(listener, on_the_way(data))
        feed(dialler, on_the_way(said(listener)))


def acquainted() -> tuple[ConnectionState, ConnectionState]:
    """A dialler and a listener that have met."""
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    shake(dialler, listener)
    assert dialler.met is not None
    assert listener.met is not None
    return dialler, listener

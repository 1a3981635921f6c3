"""Two ends of a connection in memory, and bytes to feed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gossamer.base.peer_ops import SERVER, WORKER, Peer
from gossamer.comm.rpc_protocol.connection_state import ConnectionState, ReceivedFrame
from gossamer.comm.rpc_protocol.credentials import Credentials

SERVED, ASKING = Peer(SERVER, 0), Peer(WORKER, 3)
TOKEN = bytes(range(32))
LIMIT = 2**20
BASE = Credentials(me=ASKING, token=TOKEN, run="run", recipe="Dense()", layout="abcd", largest_frame_bytes=LIMIT)


def credentials(me: Peer = ASKING, **other: object) -> Credentials:
    return dataclasses.replace(BASE, me=me, instance=bytes(16), **other)  # type: ignore[arg-type]


def feed(state: ConnectionState, data: bytes) -> list[ReceivedFrame]:
    """Frames in these bytes, given as they come."""
    frames, left = [], memoryview(data)
    while left.nbytes:
        buffer = state.receive_buffer()
        nbytes = min(buffer.nbytes, left.nbytes)
        buffer[:nbytes] = left[:nbytes]
        left = left[nbytes:]
        frames += [frame for frame in state.receive_data(nbytes) if frame is not None]
    return frames


def sent(state: ConnectionState) -> bytes:
    return b"".join(state.control_frames())


def shake(
    dialer: ConnectionState, listener: ConnectionState, on_the_way: Callable[[bytes], bytes] = lambda data: data
) -> None:
    """Carry what both send until neither sends more; `on_the_way` may change it."""
    while data := sent(listener):
        feed(dialer, on_the_way(data))
        feed(listener, on_the_way(sent(dialer)))


def authenticated_pair() -> tuple[ConnectionState, ConnectionState]:
    """A dialer and a listener that have authenticated."""
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    shake(dialer, listener)
    assert dialer.authenticated is not None
    assert listener.authenticated is not None
    return dialer, listener

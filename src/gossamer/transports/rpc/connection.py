"""One connection of the thread that serves them all: what is to be sent through it, and what comes out of it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gossamer.core.peer_ops import Peer
from gossamer.transports.rpc.event_loop import Served
from gossamer.transports.rpc.sockets import Channel
from gossamer.transports.wire.connection_state import ConnectionState, ReceivedFrame
from gossamer.transports.wire.frames import Message

READ_AT_ONCE = 2**23  # bytes; then other connections have their turn
WRITTEN_AT_ONCE = 2**23
_READY_BYTES = 2**19  # where fewer are ready to be handed to the kernel, more are summed
_BEGUN_AT_ONCE = 16


class ConnectionClosed(Exception):
    """The other end has closed the connection, or the way to it broke."""


@dataclass(eq=False)
class OutgoingMessage:
    """One message on its way through one connection.

    ready: what the kernel may take; coming: what follows that; left_bytes: of both.
    """

    message: Message
    ready: deque[memoryview] = field(default_factory=deque)
    coming: Iterator[memoryview] = iter(())
    left_bytes: int = 0
    begun: bool = False

    def begin(self, buffers: Iterator[memoryview]) -> None:
        self.coming, self.left_bytes, self.begun = buffers, self.message.frame_bytes, True

    def make_ready(self, nbytes: int) -> int:
        """Have so many bytes ready, or all. Returns how many are missing."""
        missing = nbytes - sum([each.nbytes for each in self.ready])
        while missing > 0 and (buffer := next(self.coming, None)) is not None:
            self.ready.append(buffer)
            missing -= buffer.nbytes
        return missing

    def give_back_memory(self) -> None:
        """Keep a copy of what is left, so that the tensors belong to whoever owns them again."""
        self.ready = deque(memoryview(bytes(each)) for each in (*self.ready, *self.coming))


class Connection:
    """A connection: its socket, its conversation, and a queue of parcels, in order.

    dialled: by this process. peer: who is at the other end, once that is proven. heard_at, said_at: in seconds of
    time.monotonic, when bytes last came and went.
    """

    def __init__(
        self, connection: socket.socket, channel: Channel, conversation: ConnectionState, calls: Peer | None
    ) -> None:
        self.connection, self.conversation = connection, conversation
        self.calls, self.dialled = calls, calls is not None
        self.peer: Peer | None = None
        self.heard_at = self.said_at = self.born_at = time.monotonic()
        self.queued_bytes = 0
        self.served: Served = lambda ready: None
        self._channel = channel
        self._courtesies: deque[memoryview] = deque()
        self._begun: deque[OutgoingMessage] = deque()
        self._queue: deque[OutgoingMessage] = deque()

    def send(self, message: Message) -> OutgoingMessage:
        parcel = OutgoingMessage(message)
        self._queue.append(parcel)
        self.queued_bytes += message.frame_bytes
        return parcel

    def take_back(self, parcel: OutgoingMessage) -> None:
        """Do not send what was not begun; what was is copied and goes on. Its memory is not read again."""
        if parcel.left_bytes:
            parcel.give_back_memory()
        elif not parcel.begun:
            self._queue.remove(parcel)
            self.queued_bytes -= parcel.message.frame_bytes

    @property
    def wants_to_write(self) -> bool:
        return not self.is_silent and not self._channel.waits_to_read()

    @property
    def is_silent(self) -> bool:
        """Everything that was to be said is in the kernel's hands."""
        self._courtesies.extend(self.conversation.courtesies())
        return not (self._courtesies or self._begun or self._queue)

    # -- in ----------------------------------------------------------------------------------------

    def read(self) -> Iterator[ReceivedFrame | None]:
        """Frames that have arrived, None for one of the handshake. Raises Closed, or why nothing more is read."""
        budget = READ_AT_ONCE
        more = True
        while more and (budget > 0 or self._channel.holds_bytes()):
            room = self.conversation.room()
            try:
                nbytes = self._channel.receive(room)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as fault:
                raise ConnectionClosed(str(fault)) from None
            if not nbytes:
                raise ConnectionClosed("it was closed")
            self.heard_at = time.monotonic()
            budget -= nbytes
            more = not self._channel.is_drained(nbytes, room)
            yield from self.conversation.filled(nbytes)

    # -- out ---------------------------------------------------------------------------------------

    def write(self) -> list[OutgoingMessage]:
        """Send what can be sent now; returns the parcels that are gone whole."""
        self._courtesies.extend(self.conversation.courtesies())
        gone: list[OutgoingMessage] = []
        budget = WRITTEN_AT_ONCE
        while budget > 0 and (buffers := self._next_buffers()):
            try:
                nbytes = self._channel.send(buffers)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as fault:
                raise ConnectionClosed(str(fault)) from None
            self.said_at = time.monotonic()
            budget -= nbytes
            self._account(nbytes, gone)
        return gone

    def _next_buffers(self) -> list[memoryview]:
        if self._courtesies:
            return list(self._courtesies)
        while self._queue and len(self._begun) < _BEGUN_AT_ONCE and self.conversation.met is not None:
            parcel = self._queue.popleft()
            parcel.begin(self.conversation.frame(parcel.message))
            self._begun.append(parcel)
        buffers: list[memoryview] = []
        missing = _READY_BYTES
        for parcel in self._begun:
            missing = parcel.make_ready(missing)
            buffers += parcel.ready
            if missing <= 0:
                break
        return buffers

    def _account(self, nbytes: int, gone: list[OutgoingMessage]) -> None:
        if self._courtesies:
            _drop(self._courtesies, nbytes)
            return
        self.queued_bytes -= nbytes
        while nbytes:
            parcel = self._begun[0]
            taken = min(nbytes, parcel.left_bytes)
            _drop(parcel.ready, taken)
            parcel.left_bytes -= taken
            nbytes -= taken
            if parcel.left_bytes:
                return
            gone.append(self._begun.popleft())

    def close(self) -> None:
        self.connection.close()


def _drop(buffers: deque[memoryview], nbytes: int) -> None:
    """Forget the first `nbytes`."""
    while nbytes:
        first = buffers[0]
        if nbytes < first.nbytes:
            buffers[0] = first[nbytes:]
            return
        buffers.popleft()
        nbytes -= first.nbytes

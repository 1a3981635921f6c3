"""Connection: the send queue of one socket, and the frames received through it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from selectors import EVENT_READ, EVENT_WRITE

from gossamer.base.peer_ops import Peer
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, Meter
from gossamer.comm.rpc.event_loop import OnReady
from gossamer.comm.rpc.tls_sockets import Channel
from gossamer.comm.rpc_protocol.connection_state import ConnectionState, ReceivedFrame
from gossamer.comm.rpc_protocol.frames import Message

READ_BUDGET_BYTES = 2**23  # per turn, before other connections are served
WRITE_BUDGET_BYTES = 2**23
_READY_BYTES = 2**19  # passed to the kernel at once; if fewer are ready, further chunks are encoded
_MOST_IN_TRANSIT = 16


class ConnectionClosed(Exception):
    """The peer has closed the connection, or the network broke it."""


@dataclass(eq=False)
class OutgoingMessage:
    """A message in the send queue of one connection."""

    message: Message
    ready: deque[memoryview] = field(default_factory=deque)  # encoded bytes
    upcoming: Iterator[memoryview] = iter(())  # encodes the bytes that follow
    left_bytes: int = 0  # unsent bytes of both
    begun: bool = False

    def begin(self, buffers: Iterator[memoryview]) -> None:
        self.upcoming, self.left_bytes, self.begun = buffers, self.message.frame_bytes, True

    def make_ready(self, nbytes: int) -> int:
        """Encode until `nbytes` bytes are ready, or all. Returns the number of missing bytes."""
        missing = nbytes - sum([each.nbytes for each in self.ready])
        while missing > 0 and (buffer := next(self.upcoming, None)) is not None:
            self.ready.append(buffer)
            missing -= buffer.nbytes
        return missing

    def give_back_memory(self) -> None:
        """Continue from a copy of the unsent bytes, so that the owner of the tensors may modify them."""
        self.ready = deque(memoryview(bytes(each)) for each in (*self.ready, *self.upcoming))


class Connection:
    """A socket, its protocol state, and a FIFO queue of outgoing messages. Times are those of time.monotonic.

    meter: the bandwidth limits of this machine; None without limits.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        state: ConnectionState,
        dialed_peer: Peer | None,
        meter: Meter | None = None,
    ) -> None:
        self.sock, self.state, self.meter = sock, state, meter
        self.dialed_peer, self.is_outbound = dialed_peer, dialed_peer is not None
        self.peer: Peer | None = None  # the remote peer, once it has authenticated
        self.last_received_at = self.last_sent_at = self.opened_at = time.monotonic()
        self.queued_bytes = 0
        self.on_ready: OnReady = lambda ready: None
        self._channel = channel
        self._control_frames: deque[memoryview] = deque()
        self._in_transit: deque[OutgoingMessage] = deque()
        self._queue: deque[OutgoingMessage] = deque()

    def send(self, message: Message) -> OutgoingMessage:
        outgoing = OutgoingMessage(message)
        self._queue.append(outgoing)
        self.queued_bytes += message.frame_bytes
        return outgoing

    def withdraw(self, outgoing: OutgoingMessage) -> None:
        """Cancel a message that has not begun, or continue it from a copy. Its memory is not read afterwards."""
        if outgoing.left_bytes:
            outgoing.give_back_memory()
        elif not outgoing.begun:
            self._queue.remove(outgoing)
            self.queued_bytes -= outgoing.message.frame_bytes

    @property
    def wants_to_write(self) -> bool:
        return not self.is_idle and not self._channel.needs_read_first()

    def events(self) -> int:
        """The events of the socket to wait for, without those that a bandwidth limit delays."""
        events = EVENT_READ | (EVENT_WRITE if self.wants_to_write else 0)
        if self.meter is not None:
            ready = (EVENT_READ if self.meter.room(DOWN) else 0) | (EVENT_WRITE if self.meter.room(UP) else 0)
            events &= ready
        return events

    def delay_seconds(self) -> float:
        """Seconds until a bandwidth limit may allow more than `events`; 0 if nothing is delayed."""
        if self.meter is None:
            return 0.0
        delayed = [self.meter.wait_seconds(way) for way in ((DOWN, UP) if self.wants_to_write else (DOWN,))]
        return min((each for each in delayed if each), default=0.0)

    @property
    def is_idle(self) -> bool:
        """Whether all queued bytes were passed to the kernel."""
        self._control_frames.extend(self.state.control_frames())
        return not (self._control_frames or self._in_transit or self._queue)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[ReceivedFrame | None]:
        """Yield received frames, and None for one of the handshake. Raises ConnectionClosed or the protocol's error."""
        budget = READ_BUDGET_BYTES
        more = True
        while more and (budget > 0 or self._channel.has_buffered_bytes()):
            buffer = self.state.receive_buffer()
            try:
                nbytes = self._channel.receive(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as fault:
                raise ConnectionClosed(str(fault)) from None
            if not nbytes:
                raise ConnectionClosed("it was closed")
            self.last_received_at = time.monotonic()
            budget -= nbytes
            more = not self._channel.is_drained(nbytes, buffer)
            yield from self.state.receive_data(nbytes)

    # -- sending -------------------------------------------------------------------------------------------------------

    def write(self) -> list[OutgoingMessage]:
        """Send as much as possible without blocking; return the messages that were sent completely."""
        self._control_frames.extend(self.state.control_frames())
        sent: list[OutgoingMessage] = []
        budget = WRITE_BUDGET_BYTES
        while budget > 0 and (buffers := self._next_buffers()):
            try:
                nbytes = self._channel.send(buffers)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as fault:
                raise ConnectionClosed(str(fault)) from None
            self.last_sent_at = time.monotonic()
            budget -= nbytes
            self._account(nbytes, sent)
        return sent

    def _next_buffers(self) -> list[memoryview]:
        if self._control_frames:
            return list(self._control_frames)
        while self._queue and len(self._in_transit) < _MOST_IN_TRANSIT and self.state.authenticated is not None:
            outgoing = self._queue.popleft()
            outgoing.begin(self.state.send(outgoing.message))
            self._in_transit.append(outgoing)
        buffers: list[memoryview] = []
        missing = _READY_BYTES
        for outgoing in self._in_transit:
            missing = outgoing.make_ready(missing)
            buffers += outgoing.ready
            if missing <= 0:
                break
        return buffers

    def _account(self, nbytes: int, sent: list[OutgoingMessage]) -> None:
        if self._control_frames:
            _drop(self._control_frames, nbytes)
            return
        self.queued_bytes -= nbytes
        while nbytes:
            outgoing = self._in_transit[0]
            taken = min(nbytes, outgoing.left_bytes)
            _drop(outgoing.ready, taken)
            outgoing.left_bytes -= taken
            nbytes -= taken
            if outgoing.left_bytes:
                return
            sent.append(self._in_transit.popleft())

    def close(self) -> None:
        self.sock.close()


def _drop(buffers: deque[memoryview], nbytes: int) -> None:
    """Remove the first `nbytes`."""
    while nbytes:
        first = buffers[0]
        if nbytes < first.nbytes:
            buffers[0] = first[nbytes:]
            return
        buffers.popleft()
        nbytes -= first.nbytes

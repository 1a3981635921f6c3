"""Relay: forwards bytes between two workers that cannot connect to each other, such as behind two routers.

The coordinator is a relay, and other launchers may be (RelayServer). Workers dial all relays at the same time and use
the first on which both are, which is the one with the shortest round trip.

Both open a connection to the relay's port, as a RELAY peer with the run's token, and name the meeting and the two
members. The relay answers with one byte once both are there, and then copies bytes in both directions. The handshake of
the mesh and sealed messages follow, so the relay can close the connection, but a change, a repetition or an omission
is detected by the members (comm/mesh/key_exchange).

Flow control: at most BUFFER_BYTES per direction are in memory. A worker that does not read stops the other one by TCP.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.base.host_port import Address
from gossamer.base.peer_ops import Peer, PeerScript, Push, Receipt, Stamp
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, Meter, meter_of
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.handshake import Dialer
from gossamer.comm.membership.messages import COORDINATOR, RELAY_SERVER, RELAYS
from gossamer.comm.mesh.greeter import Detour, dial
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import PURPOSE, Credentials
from gossamer.comm.rpc_protocol.messages import encode_hello
from gossamer.errors import GossamerError

RELAY = "relay"  # kind of a peer that becomes one end of a relayed connection
PAIR = struct.Struct("!QQQ")  # meeting, this member, the other member
GO = b"\x01"  # both are there
BUFFER_BYTES = 2**18
MOST_WAITING = 4096
WAITING_SECONDS = 60.0  # for the other member
ACCEPTED_SECONDS = 5.0  # to name the members
SELECT_SECONDS = 1.0  # between checks for overdue connections

Pair = tuple[int, int, int]  # meeting, and two members in ascending order


def detour(relay: Address, token: bytes, server: Peer = COORDINATOR) -> Callable[[int, int, int], Detour]:
    """Returns a function that opens a connection through a relay for (meeting, this member, the other member)."""

    def begin(meeting: int, me: int, other: int) -> Detour:
        peer = Peer(RELAY, secrets.randbits(62))
        credentials = Credentials(me=peer, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
        handshake = Dialer(PURPOSE, token, encode_hello(credentials.hello(server)))
        return Detour(other, dial(*relay), handshake, PAIR.pack(meeting, me, other), GO, server.number)

    return begin


@dataclass(eq=False)
class _End:
    """One connection of a worker."""

    sock: socket.socket
    until: float  # when it is closed unless it is paired
    named: bytearray = field(default_factory=bytearray)  # PAIR, as far as received
    buffer: bytearray = field(default_factory=bytearray)  # received from it, not yet sent to the other
    other: _End | None = None
    at_end: bool = False  # it sends nothing more
    was_announced: bool = False  # to the other end
    meter: Meter | None = None  # bandwidth limits of this machine

    def room(self, way: int, most: int) -> int:
        """How many of `most` bytes the bandwidth limits allow to transfer now."""
        return most if self.meter is None else min(most, self.meter.room(way))

    def transferred(self, way: int, nbytes: int) -> None:
        if self.meter is not None and nbytes:
            self.meter.transferred(way, nbytes)

    @property
    def pair(self) -> Pair:
        meeting, me, other = PAIR.unpack(self.named)
        return meeting, min(me, other), max(me, other)

    @property
    def member(self) -> int:
        return int(PAIR.unpack(self.named)[1])


class Relay:
    """Pairs and serves connections in a thread of its own, until it is closed. Thread-safe.

    note: called with a message for the user when the first pair is connected, and if the relay fails.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._noted = note, False
        self.forwarded_bytes = 0
        self._selector = selectors.DefaultSelector()
        self._taken: deque[socket.socket] = deque()
        self._waiting: dict[Pair, _End] = {}
        self._ends: dict[socket.socket, _End] = {}
        self._delayed: dict[socket.socket, _End] = {}  # by bandwidth limits
        self._select_seconds = SELECT_SECONDS
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._closed = False
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gossamer relay", daemon=True)
        self._thread.start()

    def take(self, sock: socket.socket) -> None:
        """Serve an authenticated connection from now on."""
        self._taken.append(sock)
        self._wake()

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, so the thread will wake up
            self._wakes.send(b"\0")

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, ready in self._selector.select(self._select_seconds):
                    if key.fileobj is self._woken:
                        with suppress(BlockingIOError):
                            self._woken.recv(4096)
                    elif (end := self._ends.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._serve(end, ready)
                if self._delayed:
                    self._watch_delayed()
                while self._taken:
                    self._begin(self._taken.popleft())
                self._close_overdue(time.monotonic())
        except BaseException as error:
            self._note(f"The relay failed: {error!r}. Workers that cannot connect to each other lose each other.")
            raise
        finally:
            for end in list(self._ends.values()):
                self._drop(end)
            for sock in (*self._taken, self._woken, self._wakes):
                sock.close()
            self._selector.close()

    def _begin(self, sock: socket.socket) -> None:
        end = _End(sock, time.monotonic() + ACCEPTED_SECONDS)
        try:
            sock.setblocking(False)
            if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family in (socket.AF_INET, socket.AF_INET6):
                # A worker that computes may leave bytes unread for long; keep-alive detects lost machines
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            self._ends[sock] = end
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError:
            self._drop(end)

    def _serve(self, end: _End, ready: int) -> None:
        other = end.other
        try:
            if other is None:
                self._name(end)
                return
            if ready & selectors.EVENT_READ:
                self._receive(end, other)
            if ready & selectors.EVENT_WRITE:
                self._send(other, end)
            for each in (end, other):
                self._watch(each)
        except OSError:
            self._drop(end)

    def _name(self, end: _End) -> None:
        """Read the names of the members, and pair the two ends of a connection. A waiting end sends nothing more."""
        try:
            received = end.sock.recv(PAIR.size - len(end.named) or 1)
        except BlockingIOError:
            return
        if not received or len(end.named) == PAIR.size:
            self._drop(end)
            return
        end.named += received
        if len(end.named) < PAIR.size:
            return
        first = self._waiting.pop(end.pair, None)
        if first is None or first.member == end.member:
            if first is not None:
                self._drop(first)  # the same member has dialed again
            self._wait(end)
            return
        first.other, end.other = end, first
        first.meter, end.meter = meter_of(first.sock), meter_of(end.sock)
        for each in (first, end):
            each.sock.sendall(GO)  # fits the buffer of a new connection
            each.until = float("inf")
        if not self._noted:
            self._noted = True
            self._note("two workers cannot connect to each other: their traffic passes this machine, sealed")

    def _wait(self, end: _End) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._drop(next(iter(self._waiting.values())))
        self._waiting[end.pair], end.until = end, time.monotonic() + WAITING_SECONDS

    def _receive(self, end: _End, other: _End) -> None:
        room = end.room(DOWN, BUFFER_BYTES - len(end.buffer))
        if room <= 0 or end.at_end:
            return
        with suppress(BlockingIOError):
            received = end.sock.recv(room)
            end.at_end = not received
            end.buffer += received
            end.transferred(DOWN, len(received))
        self._send(end, other)

    def _send(self, source: _End, sink: _End) -> None:
        """Send what was received from `source` to `sink`, as much as it takes."""
        room = sink.room(UP, len(source.buffer))
        if room > 0:
            with suppress(BlockingIOError):
                sent = sink.sock.send(source.buffer[:room])
                sink.transferred(UP, sent)
                del source.buffer[:sent]
                self.forwarded_bytes += sent
        if source.at_end and not source.buffer and not source.was_announced:
            source.was_announced = True
            sink.sock.shutdown(socket.SHUT_WR)
            if sink.was_announced:
                self._drop(source)

    def _watch(self, end: _End) -> None:
        if end.other is None or end.sock not in self._ends:
            return
        reads = not end.at_end and len(end.buffer) < BUFFER_BYTES
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.other.buffer else 0)
        if end.meter is not None:
            events = self._allowed(end, end.meter, events)
        registered = end.sock in self._selector.get_map()
        if events and registered:
            self._selector.modify(end.sock, events)
        elif events:
            self._selector.register(end.sock, events)
        elif registered:
            self._selector.unregister(end.sock)

    def _allowed(self, end: _End, meter: Meter, events: int) -> int:
        """Those of the events that the bandwidth limits allow now. The thread looks again after the wait."""
        for event, way in ((selectors.EVENT_READ, DOWN), (selectors.EVENT_WRITE, UP)):
            if events & event and (seconds := meter.wait_seconds(way)):
                events &= ~event
                self._delayed[end.sock] = end
                self._select_seconds = min(self._select_seconds, seconds)
        return events

    def _watch_delayed(self) -> None:
        """Watch the connections again that bandwidth limits delayed."""
        self._select_seconds, delayed = SELECT_SECONDS, list(self._delayed.values())
        self._delayed.clear()
        for end in delayed:
            self._watch(end)

    def _close_overdue(self, now: float) -> None:
        for end in [each for each in self._ends.values() if now >= each.until]:
            self._drop(end)

    def _drop(self, end: _End) -> None:
        """Close a connection, and the other end of its pair."""
        other, end.other = end.other, None
        if len(end.named) == PAIR.size and self._waiting.get(end.pair) is end:
            del self._waiting[end.pair]
        if self._ends.pop(end.sock, None) is not None and end.sock in self._selector.get_map():
            self._selector.unregister(end.sock)
        end.sock.close()
        if other is not None:
            self._drop(other)


class RelayServer:
    """A relay of a run whose coordinator is on another machine, until it is closed.

    Args:
        coordinator: Address of the coordinator.
        token: The run's token.
        listen: Own address and port; port 0 for any free one.
        public: Addresses at which workers reach it; empty for `listen`.
        note: Called with messages for the user.

    Raises:
        ConnectError: The port is in use.
    """

    def __init__(
        self,
        coordinator: Address,
        token: bytes,
        listen: Address,
        public: Sequence[Address],
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._relay = Relay(note)
        self.me = Peer(RELAY_SERVER, secrets.randbits(62))
        try:
            self._endpoint = TcpEndpoint(
                Credentials(me=self.me, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES),
                EndpointOptions(address=listen[0], port=listen[1], hand_over={RELAY: self._relay.take}),
            )
        except BaseException:
            self._relay.close()
            raise
        self.addresses: tuple[Address, ...] = tuple(public) or (self._endpoint.address,)
        self._endpoint.meet({COORDINATOR: coordinator})
        self._endpoint.start(self._registering())

    @property
    def forwarded_bytes(self) -> int:
        return self._relay.forwarded_bytes

    def close(self) -> None:
        """Close all connections. Workers that use them connect again by other ways, in their next view."""
        self._endpoint.close()
        self._relay.close()

    def _registering(self) -> PeerScript:
        with suppress(GossamerError):  # this server is closed
            receipt: Receipt = yield Push(
                to=COORDINATOR, key=RELAYS, stamp=Stamp(self.me.number, 0), about=json.dumps(self.addresses)
            )
            self._note(f"this launcher does not relay: {receipt.about}")

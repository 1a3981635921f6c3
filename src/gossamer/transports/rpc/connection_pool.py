"""Open connections and the bytes that go through them. Whose they are, and what is said, is for the switchboard."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import NamedTuple, Protocol

from gossamer.core.peer_ops import Peer
from gossamer.errors import GossamerError, PeerLost
from gossamer.transports.rpc.connection import Connection, ConnectionClosed, OutgoingMessage
from gossamer.transports.rpc.event_loop import EventLoop
from gossamer.transports.rpc.sockets import Channel, Place, PlainChannel, Tls, TlsChannel, check_connected, dial, tune
from gossamer.transports.wire.authentication import AuthenticatedPeer, Credentials
from gossamer.transports.wire.connection_state import ConnectionState, ReceivedFrame
from gossamer.transports.wire.messages import PING

HANDSHAKE_SECONDS = 2.0
STRANGERS = 256  # accepted connections that have not shown the token yet


class Listener(Protocol):
    """What becomes of connections. `lost` comes once for each, except those that were dropped."""

    def met(self, line: Connection, met: AuthenticatedPeer) -> None: ...
    def heard(self, line: Connection, spoken: ReceivedFrame) -> None: ...
    def sent(self, line: Connection, parcels: list[OutgoingMessage]) -> None: ...
    def lost(self, line: Connection, why: GossamerError) -> None: ...


Opened = Callable[[Connection | None], None]


class Dialling(NamedTuple):
    until: float
    opened: Opened


class EndpointOptions(NamedTuple):
    """What an endpoint keeps to: see there."""

    dead_after_seconds: float
    heartbeat_seconds: float
    queue_bytes: int
    tls: Tls | None


class ConnectionPool:
    """Every open socket but the one that listens; lives in the loop's thread."""

    def __init__(self, loop: EventLoop, papers: Credentials, habits: EndpointOptions, listener: Listener) -> None:
        self._loop, self._papers, self._habits, self._listener = loop, papers, habits, listener
        self._handshake_seconds = min(HANDSHAKE_SECONDS, habits.dead_after_seconds)
        self._connecting: dict[socket.socket, Dialling] = {}
        self.lines: set[Connection] = set()

    # -- come --------------------------------------------------------------------------------------

    def accept(self, listening: socket.socket) -> None:
        """Whoever calls."""
        try:
            connection, _ = listening.accept()
        except OSError:  # it has gone again
            return
        strangers = [line for line in self.lines if line.peer is None and not line.dialled]
        if len(strangers) >= STRANGERS:
            self.drop(min(strangers, key=lambda line: line.born_at))
        try:
            self._open(connection, None, None)
        except OSError:
            connection.close()

    def dial(self, peer: Peer, place: Place, opened: Opened) -> None:
        """Call `opened` with a line to that place, or with None where nobody answers there in time."""
        try:
            connection = dial(place.address)
        except OSError:
            opened(None)
            return
        self._connecting[connection] = Dialling(time.monotonic() + self._handshake_seconds, opened)
        self._loop.watch(connection, EVENT_WRITE, partial(self._connected, connection, peer, place))

    def _connected(self, connection: socket.socket, peer: Peer, place: Place, ready: int) -> None:
        self._loop.forget(connection)
        dialling = self._connecting.pop(connection)
        try:
            check_connected(connection)
            line = self._open(connection, peer, place.name)
        except OSError:
            connection.close()
            dialling.opened(None)
            return
        dialling.opened(line)

    def _open(self, connection: socket.socket, calls: Peer | None, host: str | None) -> Connection:
        tune(connection, self._habits.dead_after_seconds)
        channel: Channel = PlainChannel(connection)
        tls = self._habits.tls
        if tls is not None:
            context = tls.accepting if calls is None else tls.dialling
            wrapped = context.wrap_socket(
                connection, server_side=calls is None, do_handshake_on_connect=False, server_hostname=host
            )
            connection, channel = wrapped, TlsChannel(wrapped)
        line = Connection(connection, channel, ConnectionState(self._papers, calls), calls)
        line.served = partial(self._serve, line)
        self.lines.add(line)
        self._watch(line)
        return line

    # -- are used ----------------------------------------------------------------------------------

    def write(self, line: Connection) -> None:
        """Send what can be sent now; the rest follows by itself."""
        if line not in self.lines:
            return
        try:
            gone = line.write()
        except ConnectionClosed as why:
            self._lose(line, PeerLost(str(why)))
            return
        except GossamerError as why:
            self._lose(line, why)
            return
        self._watch(line)
        if gone:
            self._listener.sent(line, gone)

    def _serve(self, line: Connection, ready: int) -> None:
        if ready & EVENT_READ:
            self._read(line)
        if ready & EVENT_WRITE:
            self.write(line)

    def _read(self, line: Connection) -> None:
        try:
            for spoken in line.read():
                self._take(line, spoken)
                if line not in self.lines:
                    return
            self._watch(line)
        except ConnectionClosed as why:
            self._lose(line, PeerLost(str(why)))
        except GossamerError as why:
            with suppress(ConnectionClosed, GossamerError):
                line.write()
            self._lose(line, why)

    def _take(self, line: Connection, spoken: ReceivedFrame | None) -> None:
        if spoken is not None:
            self._listener.heard(line, spoken)
            return
        self.write(line)  # what the handshake has to say, also where it refuses
        conversation = line.conversation
        if conversation.refused is not None:
            raise conversation.refused
        if conversation.met is not None and line in self.lines:
            line.peer = conversation.met.peer
            self._listener.met(line, conversation.met)

    def _watch(self, line: Connection) -> None:
        self._loop.watch(line.connection, EVENT_READ | (EVENT_WRITE if line.wants_to_write else 0), line.served)

    # -- go ----------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Let those hear from us that have not for a while, and close what has been silent for too long."""
        for connection, dialling in list(self._connecting.items()):
            if now >= dialling.until:
                del self._connecting[connection]
                self._loop.forget(connection)
                connection.close()
                dialling.opened(None)
        for line in list(self.lines):
            if line.peer is None:
                if now - line.born_at >= self._handshake_seconds:
                    self._lose(line, PeerLost("it did not say who it is in time"))
            elif now - line.heard_at >= self._habits.dead_after_seconds:
                self._lose(line, PeerLost(f"it was silent for {now - line.heard_at:.1f} s"))
            elif now - line.said_at >= self._habits.heartbeat_seconds and line.is_silent:
                line.send(PING)
                self.write(line)

    def drop(self, line: Connection) -> None:
        """Close it and say no more about it."""
        if line in self.lines:
            self.lines.discard(line)
            self._loop.forget(line.connection)
            line.close()

    def close(self) -> None:
        for connection in self._connecting:
            self._loop.forget(connection)
            connection.close()
        self._connecting.clear()
        for line in list(self.lines):
            self.drop(line)

    def abandon(self) -> None:
        """Close what a forked child inherited; the parent's connections go on."""
        for connection in self._connecting:
            connection.close()
        for line in self.lines:
            line.close()

    def _lose(self, line: Connection, why: GossamerError) -> None:
        if line in self.lines:
            self.drop(line)
            self._listener.lost(line, why)

"""Connection pool: dials, accepts and serves connections, sends heartbeats, and closes silent connections.

The dispatcher maps connections to peers.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import NamedTuple, Protocol

from gossamer.base.peer_ops import Peer
from gossamer.comm.bandwidth.shared_buckets import meter_of
from gossamer.comm.rpc.connection import Connection, ConnectionClosed, OutgoingMessage
from gossamer.comm.rpc.event_loop import EventLoop
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.tls_sockets import (
    Channel,
    LimitedChannel,
    PlainChannel,
    ResolvedAddress,
    TlsChannel,
    check_connected,
    dial,
    tune,
)
from gossamer.comm.rpc_protocol.connection_state import ConnectionState, ReceivedFrame
from gossamer.comm.rpc_protocol.credentials import AuthenticatedPeer, Credentials
from gossamer.comm.rpc_protocol.messages import PING
from gossamer.errors import GossamerError, PeerLost

_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})


class ConnectionObserver(Protocol):
    """Callbacks of a pool. `connection_lost` is called once per connection, except for dropped ones."""

    def connection_made(self, connection: Connection, authenticated: AuthenticatedPeer) -> None: ...
    def frame_received(self, connection: Connection, frame: ReceivedFrame) -> None: ...
    def messages_sent(self, connection: Connection, sent: list[OutgoingMessage]) -> None: ...
    def connection_lost(self, connection: Connection, why: GossamerError) -> None: ...


OnDialed = Callable[[Connection | None], None]


class Dialing(NamedTuple):
    """A socket that is connecting."""

    until: float
    on_dialed: OnDialed


class ConnectionPool:
    """All open sockets of an endpoint except the listening one; used in the loop's thread only."""

    def __init__(
        self, loop: EventLoop, credentials: Credentials, options: EndpointOptions, observer: ConnectionObserver
    ) -> None:
        self._loop, self._credentials, self._options, self._observer = loop, credentials, options, observer
        self._handshake_seconds = min(options.handshake_seconds, options.dead_after_seconds)
        self._dialing: dict[socket.socket, Dialing] = {}
        self.connections: set[Connection] = set()
        self._delayed: set[Connection] = set()  # by bandwidth limits, with a pending call of the loop
        self._unproven: dict[Connection, None] = {}  # accepted and not yet authenticated, oldest first

    # -- opening -------------------------------------------------------------------------------------------------------

    def accept(self, listening: socket.socket) -> bool:
        """Accept one connection. Returns False if the process is out of file descriptors."""
        try:
            sock, _ = listening.accept()
        except OSError as fault:  # or the peer has closed it again
            return fault.errno not in _TOO_MANY_FILES
        if len(self._unproven) >= self._options.most_handshakes:
            self.drop(next(iter(self._unproven)))
        try:
            self._unproven[self._open(sock, None, None)] = None
        except OSError:
            sock.close()
        return True

    def dial(self, peer: Peer, resolved: ResolvedAddress, on_dialed: OnDialed) -> None:
        """Call `on_dialed` with a connection to that address, or with None after a timeout."""
        try:
            sock = dial(resolved.address, self._options.dial_from)
        except OSError:
            on_dialed(None)
            return
        self._dialing[sock] = Dialing(time.monotonic() + self._handshake_seconds, on_dialed)
        self._loop.watch(sock, EVENT_WRITE, partial(self._connected, sock, peer, resolved))

    def _connected(self, sock: socket.socket, peer: Peer, resolved: ResolvedAddress, ready: int) -> None:
        self._loop.unwatch(sock)
        dialing = self._dialing.pop(sock)
        try:
            check_connected(sock)
            connection = self._open(sock, peer, resolved.name)
        except OSError:
            sock.close()
            dialing.on_dialed(None)
            return
        dialing.on_dialed(connection)
        self._read(connection)  # with TLS the dialing end begins, although it sends no frame before the listener does

    def _open(self, sock: socket.socket, dialed_peer: Peer | None, host: str | None) -> Connection:
        tune(sock, self._options.dead_after_seconds)
        channel: Channel = PlainChannel(sock)
        tls = self._options.tls
        if tls is not None:
            context = tls.accepting if dialed_peer is None else tls.dialing
            wrapped = context.wrap_socket(
                sock, server_side=dialed_peer is None, do_handshake_on_connect=False, server_hostname=host
            )
            sock, channel = wrapped, TlsChannel(wrapped)
        meter = meter_of(sock)
        if meter is not None:
            channel = LimitedChannel(channel, meter)
        connection = Connection(sock, channel, ConnectionState(self._credentials, dialed_peer), dialed_peer, meter)
        connection.on_ready = partial(self._on_ready, connection)
        self.connections.add(connection)
        self._watch(connection)
        return connection

    # -- serving -------------------------------------------------------------------------------------------------------

    def write(self, connection: Connection) -> None:
        """Send as much as possible without blocking; the rest is sent when the socket is ready."""
        if connection not in self.connections:
            return
        try:
            sent = connection.write()
        except ConnectionClosed as why:
            self._close_lost(connection, PeerLost(str(why)))
            return
        except GossamerError as why:
            self._close_lost(connection, why)
            return
        self._watch(connection)
        if sent:
            self._observer.messages_sent(connection, sent)

    def _on_ready(self, connection: Connection, ready: int) -> None:
        if ready & EVENT_READ:
            self._read(connection)
        if ready & EVENT_WRITE:
            self.write(connection)

    def _read(self, connection: Connection) -> None:
        try:
            for frame in connection.read():
                self._process(connection, frame)
                if connection not in self.connections:
                    return
            self._watch(connection)
        except ConnectionClosed as why:
            self._close_lost(connection, PeerLost(str(why)))
        except GossamerError as why:
            with suppress(ConnectionClosed, GossamerError):
                connection.write()
            self._close_lost(connection, why)

    def _process(self, connection: Connection, frame: ReceivedFrame | None) -> None:
        if frame is not None:
            self._observer.frame_received(connection, frame)
            return
        self.write(connection)  # the answer of the handshake, even if it is a refusal
        state = connection.state
        if state.refusal is not None:
            raise state.refusal
        if state.authenticated is not None and connection in self.connections:
            connection.peer = state.authenticated.peer
            self._unproven.pop(connection, None)
            self._observer.connection_made(connection, state.authenticated)

    def _watch(self, connection: Connection) -> None:
        self._loop.watch(connection.sock, connection.events(), connection.on_ready)
        if (seconds := connection.delay_seconds()) and connection not in self._delayed:
            self._delayed.add(connection)
            self._loop.call_later(seconds, partial(self._watch_again, connection))

    def _watch_again(self, connection: Connection) -> None:
        """Continue after a delay by a bandwidth limit."""
        self._delayed.discard(connection)
        if connection in self.connections:
            self._watch(connection)

    # -- closing -------------------------------------------------------------------------------------------------------

    def check_timeouts(self, now: float) -> None:
        """Send heartbeats on idle connections, and close connections that were silent for too long."""
        for sock, dialing in list(self._dialing.items()):
            if now >= dialing.until:
                del self._dialing[sock]
                self._loop.unwatch(sock)
                sock.close()
                dialing.on_dialed(None)
        for connection in list(self.connections):
            if connection.peer is None:
                if now - connection.opened_at >= self._handshake_seconds:
                    self._close_lost(connection, PeerLost("it did not authenticate in time"))
            elif now - connection.last_received_at >= self._options.dead_after_seconds:
                self._close_lost(connection, PeerLost(f"it was silent for {now - connection.last_received_at:.1f} s"))
            elif now - connection.last_sent_at >= self._options.beat_seconds and connection.is_idle:
                connection.send(PING)
                self.write(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection without notifying the observer."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._unproven.pop(connection, None)
            self._loop.unwatch(connection.sock)
            connection.close()

    def release(self, connection: Connection) -> socket.socket:
        """Return the socket of a connection, which this pool no longer serves."""
        self.connections.discard(connection)
        self._loop.unwatch(connection.sock)
        return connection.sock

    def close(self) -> None:
        for sock in self._dialing:
            self._loop.unwatch(sock)
            sock.close()
        self._dialing.clear()
        for connection in list(self.connections):
            self.drop(connection)

    def abandon(self) -> None:
        """Close the sockets that a forked child inherited; the parent's connections remain open."""
        for sock in self._dialing:
            sock.close()
        for connection in self.connections:
            connection.close()

    def _close_lost(self, connection: Connection, why: GossamerError) -> None:
        if connection in self.connections:
            self.drop(connection)
            self._observer.connection_lost(connection, why)

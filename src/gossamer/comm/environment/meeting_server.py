"""Meeting server: a thread in rank 0 that serves the ranks' connections to the meeting."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from gossamer.comm.environment.meeting import FROM_RANK_BYTES, Guest, Inbox, Meeting, Replies, RunIdentity
from gossamer.errors import MalformedError, MismatchError
from gossamer.events import notice

STRANGER_SECONDS = 2.0  # time limit of a new connection to authenticate
SPARE_STRANGERS = 64  # unauthenticated connections beyond one per rank; at this limit the oldest is closed
QUIET_SECONDS = 10.0  # between two warnings of one kind
FLUSH_SECONDS = 0.5


class StrangerWarnings:
    """Warns the user about rejected connections, at most once per kind in `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._quiet_until: dict[str, float] = {}
        self._unreported: dict[str, int] = {}

    def __call__(self, kind: str, sentence: str) -> None:
        now = time.monotonic()
        if now < self._quiet_until.get(kind, 0.0):
            self._unreported[kind] = self._unreported.get(kind, 0) + 1
            return
        self._quiet_until[kind] = now + QUIET_SECONDS
        unreported = self._unreported.pop(kind, 0)
        notice(f"{sentence}{f' ({unreported} more before)' if unreported else ''}.")


@dataclass(eq=False)
class GuestConnection:
    socket: socket.socket
    where: str
    guest: Guest = field(default_factory=Guest)
    inbox: Inbox = field(default_factory=lambda: Inbox(FROM_RANK_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)

    @property
    def stranger(self) -> bool:
        return self.guest.hello is None

    def flush(self) -> None:
        """Send as much as the socket accepts now. Raises OSError if the peer has closed."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]


class MeetingServer:
    """Serves a meeting at `listener` until it is closed, so that late workers receive the reason of their refusal."""

    def __init__(self, listener: socket.socket, identity: RunIdentity) -> None:
        self._warn = StrangerWarnings()
        self._meeting = Meeting(identity, self._warn)
        self._most_strangers = identity.world + SPARE_STRANGERS
        self._listener = listener
        listener.setblocking(False)
        self._alarm, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._connections: dict[Guest, GuestConnection] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-meeting", daemon=True)
        self._thread.start()

    def missing(self, topic: str) -> list[int]:
        """Return the ranks without a text on this topic so far."""
        return self._meeting.missing(topic)

    def close(self) -> None:
        """Send pending messages, and stop."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(2 * FLUSH_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._flush_all()
        finally:
            for each in (*(connection.socket for connection in self._connections.values()), self._listener):
                each.close()
            self._selector.close()
            self._alarm.close()
            self._waker.close()

    def _turn(self) -> None:
        strangers = [connection for connection in self._connections.values() if connection.stranger]
        for key, _ in self._selector.select(STRANGER_SECONDS / 4 if strangers else None):
            if key.fileobj is self._listener:
                self._accept(strangers)
            elif key.data is not None and key.data.guest in self._connections:
                self._serve(key.data)
        for connection in strangers:
            if connection.stranger and time.monotonic() - connection.began > STRANGER_SECONDS:
                self._ignore(connection, f"it did not authenticate within {STRANGER_SECONDS:g} s")

    def _accept(self, strangers: list[GuestConnection]) -> None:
        try:
            taken, (host, *_) = self._listener.accept()
        except OSError:  # closed again, or out of descriptors, which closing a stranger frees
            taken = None
        if strangers and (taken is None or len(strangers) >= self._most_strangers):
            self._ignore(strangers.pop(0), "too many other connections followed it")
        if taken is None:
            return
        taken.setblocking(False)
        connection = GuestConnection(taken, str(host))
        self._connections[connection.guest] = connection
        self._selector.register(taken, selectors.EVENT_READ, connection)
        self._send([(connection.guest, connection.guest.handshake.output())])

    def _serve(self, connection: GuestConnection) -> None:
        try:
            data = connection.socket.recv(FROM_RANK_BYTES)
        except BlockingIOError:  # only writable
            self._flush(connection)
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            if connection.stranger:
                data = self._shake(connection, data)
            for message in connection.inbox.feed(data) if data else ():
                self._send(self._meeting.take(connection.guest, message))
        except (MalformedError, MismatchError) as problem:
            self._send([(connection.guest, connection.guest.handshake.output())])
            self._ignore(connection, f"it sent an invalid message: {problem}")

    def _shake(self, connection: GuestConnection, data: bytes) -> bytes:
        """Continue the handshake; return the bytes that follow it."""
        guest, handshake = connection.guest, connection.guest.handshake
        while data and handshake.wanted_bytes:
            data = data[handshake.receive(data) :]
            if handshake.claims is not None:
                self._send(self._meeting.admit(guest))
        return b"" if guest.dismissed else data

    def _ignore(self, connection: GuestConnection, why: str) -> None:
        if connection.guest in self._connections:
            if not connection.guest.dismissed:
                self._warn(
                    "ignored", f"a connection from {connection.where} to the workers' meeting was ignored: {why}"
                )
            self._drop(connection)

    def _drop(self, connection: GuestConnection) -> None:
        if self._connections.pop(connection.guest, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._send(self._meeting.left(connection.guest))

    def _send(self, replies: Replies) -> None:
        """Queue all messages before sending any: the first receiver may end, and rank 0 ends with this thread."""
        there = [(self._connections[guest], message) for guest, message in replies if guest in self._connections]
        for connection, message in there:
            connection.unsent += message
        for connection, _ in there:
            self._flush(connection)

    def _flush(self, connection: GuestConnection) -> None:
        try:
            connection.flush()
        except OSError:
            self._drop(connection)
            return
        if connection.guest not in self._connections:
            return
        if not connection.unsent and connection.guest.dismissed:
            self._drop(connection)
            return
        writing = selectors.EVENT_WRITE if connection.unsent else 0
        self._selector.modify(connection.socket, selectors.EVENT_READ | writing, connection)

    def _flush_all(self) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        while time.monotonic() < deadline and any(each.unsent for each in self._connections.values()):
            for connection in tuple(self._connections.values()):
                self._flush(connection)
            time.sleep(0.01)  # a connection may drop meanwhile, which queues messages to the others

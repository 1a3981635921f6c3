"""Greeter: connects one member of a meeting to all others in one thread, and drops strangers.

A member dials some members, and the rest dial it. Connections for a later meeting are kept until that meeting begins.
A connection that does not authenticate is closed after a few seconds.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.comm.handshake import Dialer, Handshake, Listener, WrongKeyError, keyed_hash
from gossamer.errors import ConnectError, GossamerError, MalformedError

STRANGER_SECONDS = 5.0  # time limit for an accepted connection to send its claims
DIAL_SECONDS = 10.0  # time limit of one connection attempt: a longer wait does not help if packets are dropped
TURN_SECONDS = 0.05  # interval between checks whether the meeting is over
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 0.05, 1.0  # first and longest pause before a member is dialed again
MOST_VISITS, MOST_PARKED = 256, 256  # unauthenticated connections: for this meeting, and for later ones

PURPOSE = b"mesh"
CLAIMS = struct.Struct("!QQQ")  # meeting, caller, called

Dial = Callable[[], socket.socket]  # opens a connection, possibly still connecting; raises OSError


def meeting_key(token: bytes, secret: bytes) -> bytes:
    """Derive the key of a meeting from the run's token and a secret that only the meeting's members received."""
    return keyed_hash(token, PURPOSE, secret)


class MembersUnreached(ConnectError):
    """Some members of a meeting could not be connected."""

    def __init__(self, message: str, unreached: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unreached = unreached  # their numbers; empty if the meeting ended early


@dataclass(frozen=True, kw_only=True)
class MeshMeeting:
    """One member's description of a meeting."""

    number: int  # later meetings have higher numbers
    key: bytes = field(repr=False)
    me: int
    names: Mapping[int, str]  # names of the other members for messages, by number
    calls: Mapping[int, Dial]  # members that this one dials; all others dial it
    insists: bool = True  # whether a failed dial is repeated


@dataclass(frozen=True)
class Caller:
    """A connection that claims to be from a member. meeting: the number of the meeting in its claims."""

    meeting: int
    caller: int
    called: int
    handshake: Listener
    connection: socket.socket


class Greeter:
    """Accepts and dials connections with one listening socket, for one meeting after another."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.listener = listener
        self.parked: deque[Caller] = deque()  # for later meetings

    def meet(
        self, meeting: MeshMeeting, seconds: float, over: Callable[[], bool] = lambda: False
    ) -> dict[int, socket.socket]:
        """Connect to all other members, and return the sockets by number.

        Args:
            meeting: The meeting.
            seconds: Time limit.
            over: Called repeatedly; the wait ends when it returns True.

        Raises:
            MembersUnreached: Some members could not be connected, or the meeting is over.
        """
        with selectors.DefaultSelector() as selector:
            attempt = _Attempt(self, meeting, selector)
            try:
                return attempt.run(time.monotonic() + seconds, over)
            except BaseException:
                attempt.hang_up()
                raise
            finally:
                attempt.end()

    def park(self, caller: Caller) -> None:
        self.parked.append(caller)
        while len(self.parked) > MOST_PARKED:
            self.parked.popleft().connection.close()

    def close(self) -> None:
        self.listener.close()
        while self.parked:
            self.parked.pop().connection.close()


class _Attempt:
    """State of one call of `meet`."""

    def __init__(self, greeter: Greeter, meeting: MeshMeeting, selector: selectors.BaseSelector) -> None:
        self._greeter, self._meeting, self._selector = greeter, meeting, selector
        self._found: dict[int, socket.socket] = {}
        self._visits: deque[_Visit] = deque()
        self._calls: dict[int, _Call] = {}
        self._pauses = dict.fromkeys(meeting.calls, AGAIN_SECONDS)
        self._due = dict.fromkeys(meeting.calls, -float("inf"))  # time of the next dial
        self._problems: dict[int, str] = {}

    def run(self, end: float, over: Callable[[], bool]) -> dict[int, socket.socket]:
        parked, self._greeter.parked = self._greeter.parked, deque()
        for caller in parked:
            self._judge(caller)
        self._selector.register(self._greeter.listener, selectors.EVENT_READ, self._accept)
        while len(self._found) < len(self._meeting.names):
            now = time.monotonic()
            if over():
                raise MembersUnreached(f"meeting {self._meeting.number} ended before all members were connected", ())
            if now >= end:
                raise self._failure()
            self._call_all(now)
            while self._visits and now >= self._visits[0].until:
                self._dismiss(self._visits[0])
            for key, _ in self._selector.select(TURN_SECONDS):
                key.data()
        return self._found

    def _failure(self) -> MembersUnreached:
        missing = tuple(number for number in self._meeting.names if number not in self._found)
        reasons = [
            f"{self._meeting.names[number]} "
            + (f"({self._problems.get(number, 'no answer')})" if number in self._meeting.calls else "(did not connect)")
            for number in missing
        ]
        return MembersUnreached(
            f"{len(missing)} of {len(self._meeting.names)} other workers were not reached: {', '.join(reasons)}. They "
            "ended, are unreachable, or have another token than this run's; check their output.",
            missing,
        )

    # -- accepted connections ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MOST_VISITS):  # bounded, so that other events are served
            try:
                connection, _ = self._greeter.listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # closed before it was accepted
            except OSError as problem:
                raise MembersUnreached(f"this worker can no longer accept connections ({problem})", ()) from None
            try:
                visit = _Visit(connection)
            except OSError:
                connection.close()
                continue
            self._visits.append(visit)
            self._selector.register(connection, selectors.EVENT_READ, lambda visit=visit: self._hear(visit))
            if len(self._visits) > MOST_VISITS:
                self._dismiss(self._visits[0])

    def _hear(self, visit: _Visit) -> None:
        if visit not in self._visits:
            return  # dismissed in this iteration
        try:
            caller = visit.hear()
        except (OSError, GossamerError):
            self._dismiss(visit)
            return
        if caller is not None:
            self._visits.remove(visit)
            self._selector.unregister(visit.connection)
            self._judge(caller)

    def _judge(self, caller: Caller) -> None:
        """Accept a member, keep a connection for a later meeting, and close any other."""
        meeting = self._meeting
        if caller.meeting > meeting.number and caller.called == meeting.me:
            self._greeter.park(caller)
            return
        expected = caller.meeting == meeting.number and caller.called == meeting.me
        if expected and caller.caller in meeting.names and caller.caller not in meeting.calls:
            with suppress(OSError, WrongKeyError):
                caller.handshake.accept(meeting.key)
                _send(caller.connection, caller.handshake)
                self._take(caller.caller, caller.connection)
                return
        caller.connection.close()

    def _take(self, number: int, connection: socket.socket) -> None:
        """Keep the newer connection if a member has dialed twice, because it has abandoned the older one."""
        if (before := self._found.pop(number, None)) is not None:
            before.close()
        self._found[number] = connection

    def _dismiss(self, visit: _Visit) -> None:
        self._visits.remove(visit)
        self._selector.unregister(visit.connection)
        visit.connection.close()

    # -- dialed connections --------------------------------------------------------------------------------------------

    def _call_all(self, now: float) -> None:
        for call in list(self._calls.values()):
            if not call.connected and now >= call.until:
                self._give_up(call, TimeoutError("no answer to packets"))
        for number, due in list(self._due.items()):
            if now >= due:
                del self._due[number]
                try:
                    call = _Call(number, self._meeting, self._meeting.calls[number]())
                except OSError as problem:
                    self._call_later(number, problem)
                    continue
                self._calls[number] = call
                self._selector.register(call.connection, selectors.EVENT_WRITE, lambda call=call: self._advance(call))

    def _advance(self, call: _Call) -> None:
        try:
            if not call.connected:
                call.connect()
                act = self._selector.get_key(call.connection).data
                self._selector.modify(call.connection, selectors.EVENT_READ, act)
            elif call.hear():
                self._selector.unregister(call.connection)
                del self._calls[call.number]
                self._take(call.number, call.connection)
        except OSError as problem:
            self._give_up(call, problem)

    def _give_up(self, call: _Call, problem: OSError) -> None:
        self._selector.unregister(call.connection)
        call.connection.close()
        del self._calls[call.number]
        self._call_later(call.number, problem)

    def _call_later(self, number: int, problem: OSError) -> None:
        self._problems[number] = problem.strerror or str(problem)
        if not self._meeting.insists:
            raise self._failure()
        self._due[number] = time.monotonic() + self._pauses[number]
        self._pauses[number] = min(2 * self._pauses[number], MOST_AGAIN_SECONDS)

    # -- closing -------------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        for connection in self._found.values():
            connection.close()

    def end(self) -> None:
        """Close unfinished connections. Members of a later meeting will dial again."""
        for visit in self._visits:
            visit.connection.close()
        for call in self._calls.values():
            call.connection.close()


class _Visit:
    """An accepted connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until = connection, time.monotonic() + STRANGER_SECONDS
        self._handshake = Listener(PURPOSE, limit_bytes=CLAIMS.size)
        _prepare(connection)
        _send(connection, self._handshake)

    def hear(self) -> Caller | None:
        """Return the peer's claims once they are complete. Raises OSError, and GossamerError for invalid bytes."""
        _receive(self.connection, self._handshake)
        if (claims := self._handshake.claims) is None:
            return None
        if len(claims) != CLAIMS.size:
            raise MalformedError("invalid claims of a mesh member")
        meeting, caller, called = CLAIMS.unpack(claims)
        return Caller(meeting, caller, called, self._handshake, self.connection)


class _Call:
    """A connection that this member dialed."""

    def __init__(self, number: int, meeting: MeshMeeting, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.connected, self.until = False, time.monotonic() + DIAL_SECONDS
        claims = CLAIMS.pack(meeting.number, meeting.me, number)
        self._handshake = Dialer(PURPOSE, meeting.key, claims, limit_bytes=CLAIMS.size)
        connection.setblocking(False)

    def connect(self) -> None:
        """Complete the connection. Raises OSError if it has failed."""
        if problem := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(problem, os.strerror(problem))
        if self.connection.getsockname() == self.connection.getpeername():
            raise ConnectionError("it was connected to itself, which happens on loopback if nothing listens there")
        _prepare(self.connection)
        self.connected = True

    def hear(self) -> bool:
        """Whether the peer has authenticated. Raises OSError if it fails to."""
        try:
            _receive(self.connection, self._handshake)
        except WrongKeyError:
            raise ConnectionError("the peer failed authentication: it does not have this run's secrets") from None
        except GossamerError as problem:
            raise ConnectionError(str(problem)) from None
        if self._handshake.refused is not None:
            raise ConnectionError("the peer refused this worker")
        _send(self.connection, self._handshake)
        return self._handshake.accepted is not None


def dial(host: str, port: int) -> socket.socket:
    """Begin to open a connection. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, handshake: Handshake) -> None:
    """Send a few bytes, for which the buffer of a new connection always has room."""
    data = handshake.output()
    if data and connection.send(data) != len(data):
        raise ConnectionError("the peer stopped reading during the handshake")


def _receive(connection: socket.socket, handshake: Handshake) -> None:
    """Receive available bytes of the handshake, but none of those that follow it."""
    while wanted := handshake.wanted_bytes:
        try:
            came = connection.recv(wanted)
        except BlockingIOError:
            return
        if not came:
            raise ConnectionError("the peer disconnected during the handshake")
        handshake.receive(came)

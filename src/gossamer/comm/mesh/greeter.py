"""Greeter: connects one member of a meeting to all others, in one thread; strangers are dropped and disturb nobody.

A member calls some of the others, and the rest call it. Whoever calls for a later meeting is put aside until that one
is known; a connection that does not say who it is gets closed after seconds.
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

STRANGER_SECONDS = 5.0  # for a hello, once its connection was accepted
DIAL_SECONDS = 10.0  # of one connection: where packets are dropped, no waiting helps
TURN_SECONDS = 0.05  # after which it is asked again whether the meeting is over
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 0.05, 1.0  # before a member is called again: at first, and at most
MOST_VISITS, MOST_PARKED = 256, 256  # connections of unknown callers: here, and for later meetings

PURPOSE = b"mesh"
CLAIMS = struct.Struct("!QQQ")  # meeting, caller, called

Dial = Callable[[], socket.socket]  # a connection, or one that is on its way; raises OSError


def meeting_key(token: bytes, secret: bytes) -> bytes:
    """The key of one meeting, from the run's token and a secret that only this meeting's members received."""
    return keyed_hash(token, PURPOSE, secret)


class MembersUnreached(ConnectError):
    """Some members of a meeting were not connected."""

    def __init__(self, message: str, unreached: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unreached = unreached  # their numbers; none where the meeting was over before


@dataclass(frozen=True, kw_only=True)
class MeshMeeting:
    """What one member knows of a meeting."""

    number: int  # later meetings have higher ones
    key: bytes = field(repr=False)
    me: int
    names: Mapping[int, str]  # of the other members, by their numbers, as the user is told of them
    calls: Mapping[int, Dial]  # those whom this member calls; all others call it
    insists: bool = True  # whether a call that failed is tried again


@dataclass(frozen=True)
class Caller:
    """A connection whose end claims to be a member. meeting: the number of the one that it means."""

    meeting: int
    caller: int
    called: int
    handshake: Listener
    connection: socket.socket


class Greeter:
    """Greets by one listening socket, in one meeting after the other."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.listener = listener
        self.parked: deque[Caller] = deque()  # for later meetings

    def meet(
        self, meeting: MeshMeeting, seconds: float, over: Callable[[], bool] = lambda: False
    ) -> dict[int, socket.socket]:
        """A connection to each of the others. Raises MembersUnreached.

        over: asked now and then; once it is true, nobody waits any longer.
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
    """What one call of `meet` is at."""

    def __init__(self, greeter: Greeter, meeting: MeshMeeting, selector: selectors.BaseSelector) -> None:
        self._greeter, self._meeting, self._selector = greeter, meeting, selector
        self._found: dict[int, socket.socket] = {}
        self._visits: deque[_Visit] = deque()
        self._calls: dict[int, _Call] = {}
        self._pauses = dict.fromkeys(meeting.calls, AGAIN_SECONDS)
        self._due = dict.fromkeys(meeting.calls, -float("inf"))  # when a member is called
        self._problems: dict[int, str] = {}

    def run(self, end: float, over: Callable[[], bool]) -> dict[int, socket.socket]:
        parked, self._greeter.parked = self._greeter.parked, deque()
        for caller in parked:
            self._judge(caller)
        self._selector.register(self._greeter.listener, selectors.EVENT_READ, self._accept)
        while len(self._found) < len(self._meeting.names):
            now = time.monotonic()
            if over():
                raise MembersUnreached(f"meeting {self._meeting.number} was over before all had met", ())
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
        said = [
            f"{self._meeting.names[number]} "
            + (f"({self._problems.get(number, 'no answer')})" if number in self._meeting.calls else "(did not call)")
            for number in missing
        ]
        return MembersUnreached(
            f"{len(missing)} of {len(self._meeting.names)} other workers were not reached: {', '.join(said)}. They "
            "ended, are cut off, or hold another token than this run's; their own output says which.",
            missing,
        )

    # -- those who call ------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MOST_VISITS):  # and others have their turn, however many call
            try:
                connection, _ = self._greeter.listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it was gone before
            except OSError as problem:
                raise MembersUnreached(f"this worker cannot take connections any more ({problem})", ()) from None
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
            return  # dismissed in this turn
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
        """Take a member in, put aside who means a later meeting, and hang up on everybody else."""
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
        """The newer one, where a member has called twice: it has given the other up."""
        if (before := self._found.pop(number, None)) is not None:
            before.close()
        self._found[number] = connection

    def _dismiss(self, visit: _Visit) -> None:
        self._visits.remove(visit)
        self._selector.unregister(visit.connection)
        visit.connection.close()

    # -- those who are called ------------------------------------------------------------------------

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

    # -- the end -------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        for connection in self._found.values():
            connection.close()

    def end(self) -> None:
        """Nobody serves those any more who are not done; who belongs to a later meeting will call again."""
        for visit in self._visits:
            visit.connection.close()
        for call in self._calls.values():
            call.connection.close()


class _Visit:
    """A connection that was accepted."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until = connection, time.monotonic() + STRANGER_SECONDS
        self._handshake = Listener(PURPOSE, limit_bytes=CLAIMS.size)
        _prepare(connection)
        _send(connection, self._handshake)

    def hear(self) -> Caller | None:
        """The claims of its end, once all of them are here. Raises OSError, and GossamerError for other bytes."""
        _receive(self.connection, self._handshake)
        if (claims := self._handshake.claims) is None:
            return None
        if len(claims) != CLAIMS.size:
            raise MalformedError("these are no claims of a mesh's member")
        meeting, caller, called = CLAIMS.unpack(claims)
        return Caller(meeting, caller, called, self._handshake, self.connection)


class _Call:
    """A connection that this member asked for."""

    def __init__(self, number: int, meeting: MeshMeeting, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.connected, self.until = False, time.monotonic() + DIAL_SECONDS
        claims = CLAIMS.pack(meeting.number, meeting.me, number)
        self._handshake = Dialer(PURPOSE, meeting.key, claims, limit_bytes=CLAIMS.size)
        connection.setblocking(False)

    def connect(self) -> None:
        """The connection is there, or has failed: then it raises OSError."""
        if problem := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(problem, os.strerror(problem))
        if self.connection.getsockname() == self.connection.getpeername():
            raise ConnectionError("it was connected to itself, as happens on loopback where nobody listens")
        _prepare(self.connection)
        self.connected = True

    def hear(self) -> bool:
        """Whether the other end has proven itself. Raises OSError where it has not."""
        try:
            _receive(self.connection, self._handshake)
        except WrongKeyError:
            raise ConnectionError("who listens there does not know this run's secrets") from None
        except GossamerError as problem:
            raise ConnectionError(str(problem)) from None
        if self._handshake.refused is not None:
            raise ConnectionError("the other end refused this worker")
        _send(self.connection, self._handshake)
        return self._handshake.accepted is not None


def dial(host: str, port: int) -> socket.socket:
    """A connection that is on its way. Raises OSError."""
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
    """A few bytes, which a new connection always takes."""
    data = handshake.output()
    if data and connection.send(data) != len(data):
        raise ConnectionError("the peer stopped reading during the handshake")


def _receive(connection: socket.socket, handshake: Handshake) -> None:
    """Bytes of the handshake that are here: the bytes that follow it belong to others."""
    while wanted := handshake.wanted_bytes:
        try:
            came = connection.recv(wanted)
        except BlockingIOError:
            return
        if not came:
            raise ConnectionError("the other end hung up while it was greeted")
        handshake.receive(came)

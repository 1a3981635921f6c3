"""Greeter: connects one member of a meeting to all others in one thread, and drops strangers.

Of each pair of members one is the caller, which dials the other one. If that does not succeed soon, both also dial from
their listening ports, and dial relays; `connection_candidates` decides which one is used. Connections for a later
meeting are kept until that meeting begins. A connection that does not authenticate is closed after a few seconds.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from gossamer.base import system
from gossamer.comm.handshake import Dialer, Handshake, Listener, WrongKeyError, keyed_hash
from gossamer.comm.mesh.connection_candidates import Approach, ConnectionCandidate, ConnectionCandidates
from gossamer.errors import ConnectError, GossamerError, MalformedError

STRANGER_SECONDS = 5.0  # time limit for an accepted connection to send its claims
DIAL_SECONDS = 10.0  # time limit of one connection attempt: a longer wait does not help if packets are dropped
TURN_SECONDS = 0.05  # interval between checks whether the meeting is over
MOST_OFFER_BYTES = 64
MOST_VISITS, MOST_PARKED = 256, 256  # unauthenticated connections: for this meeting, and for later ones

PURPOSE = b"mesh"
CLAIMS = struct.Struct("!QQQ")  # meeting, caller, called

Dial = Callable[[], socket.socket]  # begins to open a connection; raises OSError


def meeting_key(token: bytes, secret: bytes) -> bytes:
    """Derive the key of a meeting from the run's token and a secret that only the meeting's members received."""
    return keyed_hash(token, PURPOSE, secret)


class MembersUnreached(ConnectError):
    """Some members of a meeting could not be connected."""

    def __init__(self, message: str, unreached: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unreached = unreached  # their numbers; empty if the meeting ended early


class KeyExchange:
    """Exchange of keys as part of each connection's handshake. This one exchanges nothing.

    offer: claims of this member; equally long at all members.
    """

    offer = b""

    def agreed(self, number: int, offer: bytes, handshake: Handshake) -> None:
        """Called for each member's connection that has authenticated, with that member's offer."""


NO_EXCHANGE = KeyExchange()


@dataclass(frozen=True, kw_only=True)
class MeshMeeting:
    """One member's description of a meeting."""

    number: int  # later meetings have higher numbers
    key: bytes = field(repr=False)
    me: int
    names: Mapping[int, str]  # names of the other members for messages, by number
    calls: Mapping[int, Dial]  # members of which this one is the caller; it is called by all others
    insists: bool = True  # whether a failed dial is repeated
    punches: Mapping[int, Sequence[Dial]] = field(default_factory=dict)  # dials from the own listening port
    detours: Sequence[Callable[[int, int, int], Detour]] = ()  # each dials a relay for (meeting, me, other)
    exchange: KeyExchange = NO_EXCHANGE
    relayed: dict[int, int] = field(default_factory=dict)  # receives the relay of each member that is connected by one


@dataclass(frozen=True)
class Caller:
    """A connection that claims to be from a member. meeting: the number of the meeting in its claims."""

    meeting: int
    caller: int
    called: int
    handshake: Listener
    connection: socket.socket
    offer: bytes


class Detour:
    """A connection to another member by a relay, to which this end first authenticates.

    Args:
        number: the other member.
        connection: to the relay, possibly still connecting.
        handshake: with the relay.
        claims: sent after the handshake: the meeting and the members.
        go: the byte with which the relay answers once both members are there.
        relay: the number of the relay's peer.
    """

    def __init__(
        self, number: int, connection: socket.socket, handshake: Dialer, claims: bytes, go: bytes, relay: int
    ) -> None:
        self.number, self.connection, self.relay = number, connection, relay
        self._named = False
        self._handshake, self._claims, self._go = handshake, claims, go

    def is_paired(self) -> bool:
        """Whether the other member is there, so that its bytes follow. Raises OSError and GossamerError."""
        _receive(self.connection, self._handshake)
        _send(self.connection, self._handshake)
        if self._handshake.refused is not None:
            raise ConnectionError("the relay refused this worker")
        if self._handshake.accepted is None:
            return False
        if not self._named:
            self._named = True
            self.connection.sendall(self._claims)
        try:
            received = self.connection.recv(len(self._go))
        except BlockingIOError:
            return False
        if received != self._go:
            raise ConnectionError("the relay disconnected")
        return True


class Greeter:
    """Accepts and dials connections with its listening sockets, for one meeting after another."""

    def __init__(self, *listeners: socket.socket) -> None:
        for each in listeners:
            each.setblocking(False)
        self.listeners = listeners
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
        for each in self.listeners:
            each.close()
        while self.parked:
            self.parked.pop().connection.close()


class _Attempt:
    """State of one call of `meet`."""

    def __init__(self, greeter: Greeter, meeting: MeshMeeting, selector: selectors.BaseSelector) -> None:
        self._greeter, self._meeting, self._selector = greeter, meeting, selector
        self._found: dict[int, socket.socket] = {}
        self._visits: deque[_Visit] = deque()
        now = time.monotonic()
        self._candidates = {number: ConnectionCandidates(self._ways(number), now) for number in meeting.names}
        self._links: dict[ConnectionCandidate, _Link] = {}  # open connections, except accepted ones
        self._relays: dict[socket.socket, int] = {}  # by connection
        self._problems: dict[int, str] = {}

    def _ways(self, number: int) -> Iterator[ConnectionCandidate]:
        meeting = self._meeting
        if number in meeting.calls:
            yield ConnectionCandidate(Approach.DIRECT, meeting.calls[number])
        for dial_from_listener in meeting.punches.get(number, ()):
            yield ConnectionCandidate(Approach.PUNCHED, dial_from_listener)
        for detour in meeting.detours:
            yield ConnectionCandidate(Approach.RELAYED, partial(detour, meeting.number, meeting.me, number))

    def run(self, end: float, over: Callable[[], bool]) -> dict[int, socket.socket]:
        parked, self._greeter.parked = self._greeter.parked, deque()
        for caller in parked:
            self._judge(caller)
        for listener in self._greeter.listeners:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        while len(self._found) < len(self._meeting.names):
            now = time.monotonic()
            if over():
                raise MembersUnreached(f"meeting {self._meeting.number} ended before all members were connected", ())
            if now >= end:
                raise self._failure()
            self._open_all(now)
            self._close_overdue(now)
            for key, _ in self._selector.select(TURN_SECONDS):
                key.data()
        relayed = {number: self._relays[each] for number, each in self._found.items() if each in self._relays}
        self._meeting.relayed.update(relayed)
        return self._found

    def _failure(self) -> MembersUnreached:
        missing = tuple(number for number in self._meeting.names if number not in self._found)
        reasons = [
            f"{self._meeting.names[number]} ("
            + self._problems.get(number, "no answer" if number in self._meeting.calls else "did not connect")
            + ")"
            for number in missing
        ]
        return MembersUnreached(
            f"{len(missing)} of {len(self._meeting.names)} other workers were not reached: {', '.join(reasons)}. They "
            "ended, are unreachable, or have another token than this run's; check their output.",
            missing,
        )

    # -- accepted connections ------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_VISITS):  # bounded, so that other events are served
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # closed before it was accepted
            except OSError as problem:
                raise MembersUnreached(f"this worker can no longer accept connections ({problem})", ()) from None
            self._visit(connection)

    def _visit(self, connection: socket.socket, knock: bytes | None = None, link: _Link | None = None) -> None:
        """Wait for a caller's proof on a connection. link: the connection, if this end has opened it."""
        try:
            visit = _Visit(connection, knock, link)
        except OSError as problem:
            connection.close()
            if link is not None:
                self._forget(link, problem)
            return
        self._visits.append(visit)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._progress(visit))
        if len(self._visits) > MOST_VISITS:
            self._dismiss(self._visits[0])

    def _progress(self, visit: _Visit) -> None:
        if visit not in self._visits:
            return  # dismissed in this iteration
        try:
            caller = visit.advance()
        except (OSError, GossamerError):
            self._dismiss(visit)
            return
        if visit.knocked is not None:
            self._leave(visit)
            self._turn(visit.connection, visit.knocked)
        elif caller is not None:
            self._leave(visit)
            self._judge(caller)
            if visit.link is not None and visit.connection.fileno() >= 0:
                self._links.pop(visit.link.candidate, None)  # it is used, or kept for a later meeting
            elif visit.link is not None:
                self._forget(visit.link, None)

    def _judge(self, caller: Caller) -> None:
        """Accept a member, keep a connection for a later meeting, and close any other."""
        meeting = self._meeting
        if caller.meeting > meeting.number and caller.called == meeting.me:
            self._greeter.park(caller)
            return
        expected = caller.meeting == meeting.number and caller.called == meeting.me
        if expected and caller.caller in meeting.names and caller.caller not in meeting.calls:
            with suppress(OSError, GossamerError):
                if len(caller.offer) != len(meeting.exchange.offer):
                    raise MalformedError("only one of the two members seals its connections")
                caller.handshake.accept(meeting.key, meeting.exchange.offer)
                meeting.exchange.agreed(caller.caller, caller.offer, caller.handshake)
                _send(caller.connection, caller.handshake)
                self._take(caller.caller, caller.connection)
                return
        caller.connection.close()

    def _turn(self, connection: socket.socket, claims: bytes) -> None:
        """Become the caller on a connection that the other member has opened."""
        meeting, knocking, me = CLAIMS.unpack(claims) if len(claims) == CLAIMS.size else (-1, -1, -1)
        expected = meeting == self._meeting.number and me == self._meeting.me and knocking in self._meeting.calls
        candidate = self._candidates[knocking].knocked() if expected and knocking not in self._found else None
        if candidate is None:
            connection.close()
            return
        link = self._links[candidate] = _Link(knocking, candidate, connection)
        link.connected, link.call = True, _Call(knocking, self._meeting, connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._advance(link))

    def _take(self, number: int, connection: socket.socket) -> None:
        """Keep the newer connection if a member has proven itself twice, because it has abandoned the older one."""
        if (before := self._found.pop(number, None)) is not None:
            before.close()
        self._found[number] = connection
        for link in [each for each in self._links.values() if each.number == number]:
            del self._links[link.candidate]
            if link.connection is not connection:
                self._unwatch(link)
                link.connection.close()

    def _leave(self, visit: _Visit) -> None:
        self._visits.remove(visit)
        with suppress(KeyError, ValueError):  # its connection was closed by `_take`
            self._selector.unregister(visit.connection)

    def _dismiss(self, visit: _Visit) -> None:
        self._leave(visit)
        visit.connection.close()
        if visit.link is not None:
            self._forget(visit.link, None)

    # -- opened connections --------------------------------------------------------------------------------------------

    def _open_all(self, now: float) -> None:
        for number, candidates in self._candidates.items():
            if number in self._found:
                continue
            for candidate in candidates.due(now):
                assert candidate.open is not None
                try:
                    opened = candidate.open()
                except OSError as problem:
                    self._note(number, candidate, problem)
                    candidates.failed(candidate, now)
                    continue
                detour = opened if isinstance(opened, Detour) else None
                connection = opened if detour is None else detour.connection
                if detour is not None:
                    self._relays[connection] = detour.relay
                link = self._links[candidate] = _Link(number, candidate, connection, detour)
                act = lambda link=link: self._advance(link)  # noqa: E731
                self._selector.register(connection, selectors.EVENT_WRITE, act)

    def _advance(self, link: _Link) -> None:
        if self._links.get(link.candidate) is not link:
            return  # closed in this iteration
        try:
            if link.call is not None:
                accepted = link.call.advance()
            elif not link.connected:
                link.connect()
                self._selector.modify(link.connection, selectors.EVENT_READ, lambda: self._advance(link))
            elif link.detour is not None and link.detour.is_paired():
                link.detour = None
        except (OSError, GossamerError) as problem:
            self._give_up(link, problem)
            return
        if link.call is None:
            if link.connected and link.detour is None:
                self._connected(link)
        elif accepted:
            self._unwatch(link)
            self._take(link.number, link.connection)
        elif link.call.is_present and not link.was_present:
            link.was_present = True
            self._candidates[link.number].present(link.candidate)
            self._prove(link.number)

    def _connected(self, link: _Link) -> None:
        if link.number in self._meeting.calls:
            link.call = _Call(link.number, self._meeting, link.connection)
            return
        self._unwatch(link)
        claims = CLAIMS.pack(self._meeting.number, self._meeting.me, link.number)
        self._visit(link.connection, claims if link.candidate.way is Approach.PUNCHED else None, link)

    def _prove(self, number: int) -> None:
        candidate = self._candidates[number].to_prove(time.monotonic())
        if candidate is not None:
            link = self._links[candidate]
            assert link.call is not None
            try:
                link.call.prove()
            except OSError as problem:
                self._give_up(link, problem)

    # -- closing -------------------------------------------------------------------------------------------------------

    def _close_overdue(self, now: float) -> None:
        while self._visits and now >= self._visits[0].until:
            self._dismiss(self._visits[0])
        for link in [each for each in self._links.values() if not each.connected and now >= each.until]:
            self._give_up(link, TimeoutError("no answer to packets"))
        for number, candidates in self._candidates.items():
            if number not in self._found and (late := candidates.overdue(now)) is not None:
                self._give_up(self._links[late], TimeoutError("no answer to the proof of this worker"))

    def _give_up(self, link: _Link, problem: Exception) -> None:
        self._unwatch(link)
        link.connection.close()
        self._forget(link, problem)

    def _forget(self, link: _Link, problem: Exception | None) -> None:
        """Record that a connection that this end has opened is closed."""
        if self._links.pop(link.candidate, None) is None:
            return
        if problem is not None:
            self._note(link.number, link.candidate, problem)
        self._candidates[link.number].failed(link.candidate, time.monotonic())
        self._prove(link.number)

    def _note(self, number: int, candidate: ConnectionCandidate, problem: Exception) -> None:
        """Keep the problem of the direct connection, or else of another one, for the error message."""
        text = getattr(problem, "strerror", None) or str(problem)
        if candidate.way is Approach.DIRECT:
            self._problems[number] = text
        else:
            self._problems.setdefault(number, f"by the relay: {text}" if candidate.way is Approach.RELAYED else text)
        if not self._meeting.insists:
            raise self._failure()

    def _unwatch(self, link: _Link) -> None:
        with suppress(KeyError, ValueError):  # it is not registered
            self._selector.unregister(link.connection)

    def hang_up(self) -> None:
        for connection in self._found.values():
            connection.close()

    def end(self) -> None:
        """Close unfinished connections. Members of a later meeting will dial again."""
        for visit in self._visits:
            visit.connection.close()
        for link in self._links.values():
            link.connection.close()


class _Link:
    """A connection of one candidate. detour: by a relay, until the other member has connected to it, too."""

    def __init__(
        self, number: int, candidate: ConnectionCandidate, connection: socket.socket, detour: Detour | None = None
    ) -> None:
        self.number, self.candidate, self.connection, self.detour = number, candidate, connection, detour
        self.connected = self.was_present = False
        self.until = time.monotonic() + DIAL_SECONDS
        self.call: _Call | None = None
        connection.setblocking(False)

    def connect(self) -> None:
        """Complete the connection. Raises OSError if it has failed."""
        if problem := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(problem, os.strerror(problem))
        if self.connection.getsockname() == self.connection.getpeername():
            raise ConnectionError("it was connected to itself, which happens on loopback if nothing listens there")
        _prepare(self.connection)
        self.connected = True


class _Visit:
    """A connection on which this end waits for a caller.

    knock: claims, if this end has opened the connection and the other end may have accepted it.
    """

    def __init__(self, connection: socket.socket, knock: bytes | None, link: _Link | None) -> None:
        self.connection, self.link, self.until = connection, link, time.monotonic() + STRANGER_SECONDS
        limit = CLAIMS.size + MOST_OFFER_BYTES
        self._handshake = Listener(PURPOSE, limit_bytes=limit, knock=knock, takes_knocks=link is None)
        _prepare(connection)
        _send(connection, self._handshake)

    def advance(self) -> Caller | None:
        """Return the peer's claims once they are complete. Raises OSError, and GossamerError for invalid bytes."""
        _receive(self.connection, self._handshake)
        if self.knocked is not None or (claims := self._handshake.claims) is None:
            return None
        if len(claims) < CLAIMS.size:
            raise MalformedError("invalid claims of a mesh member")
        meeting, caller, called = CLAIMS.unpack_from(claims)
        return Caller(meeting, caller, called, self._handshake, self.connection, claims[CLAIMS.size :])

    @property
    def knocked(self) -> bytes | None:
        """Claims of the other end's knock: that end has opened the connection, but is not the caller."""
        return self._handshake.knocked


class _Call:
    """The caller's handshake on one connection. `prove` sends the proof."""

    def __init__(self, number: int, meeting: MeshMeeting, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        claims = CLAIMS.pack(meeting.number, meeting.me, number) + meeting.exchange.offer
        self._meeting = meeting
        self._handshake = Dialer(PURPOSE, meeting.key, claims, limit_bytes=MOST_OFFER_BYTES, takes_knocks=True)

    @property
    def is_present(self) -> bool:
        """Whether the other member waits for the proof."""
        return self._handshake.was_challenged

    def prove(self) -> None:
        """Send the proof. Raises OSError."""
        _send(self.connection, self._handshake)

    def advance(self) -> bool:
        """Whether the peer has authenticated. Raises OSError if it fails to."""
        try:
            _receive(self.connection, self._handshake)
        except WrongKeyError:
            raise ConnectionError("the peer failed authentication: it does not have this run's secrets") from None
        except GossamerError as problem:
            raise ConnectionError(str(problem)) from None
        if self._handshake.refused is not None:
            raise ConnectionError("the peer refused this worker")
        offer = self._handshake.accepted
        if offer is None:
            return False
        try:
            self._meeting.exchange.agreed(self.number, offer, self._handshake)
        except GossamerError as problem:
            raise ConnectionError(str(problem)) from None
        return True


def dial(host: str, port: int, source: tuple[str, int] | None = None) -> socket.socket:
    """Begin to open a connection. source: own address, which may be that of a listening socket. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        if source is not None:
            system.share_port(connection)
            connection.bind(source)
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

"""Who is here, what was asked of whom, and where answers go: the thread that serves an endpoint's connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from selectors import EVENT_READ
from threading import Event

from gossamer.core.peer_ops import Peer
from gossamer.errors import ConnectError, GossamerError, MalformedError, MismatchError
from gossamer.events import notice
from gossamer.transports.rpc.connection import Connection, OutgoingMessage
from gossamer.transports.rpc.connection_pool import ConnectionPool, EndpointOptions
from gossamer.transports.rpc.event_loop import EventLoop
from gossamer.transports.rpc.mailbox import Asker, Mailbox, Pending, closed
from gossamer.transports.rpc.peer_state import PeerState, Traffic
from gossamer.transports.rpc.sockets import Place
from gossamer.transports.wire.authentication import AuthenticatedPeer, Credentials
from gossamer.transports.wire.connection_state import ReceivedFrame
from gossamer.transports.wire.frames import Kind, Message
from gossamer.transports.wire.messages import GOODBYE, PulledRecord, PullRecord, PushRecord, ReceiptRecord

STRIKES = 3  # malformed answers to a call, one after the other, before whoever asks is told


class Dispatcher:
    """Serves all peers of one endpoint. Every method but `run` and `traffic` is to be posted to `loop`, or acted by it.

    A connection that breaks is dialled again while asks wait for their answer, and as long as its peer does not count
    as gone; what was asked through it and not answered is sent again, the same bytes.
    """

    def __init__(
        self, papers: Credentials, listening: socket.socket, mailbox: Mailbox, habits: EndpointOptions
    ) -> None:
        self._papers, self._listening, self._mailbox, self._habits = papers, listening, mailbox, habits
        self._peer_states: dict[Peer, PeerState] = {}
        self._noticed: set[str] = set()
        self._tick_at, self._close_at = 0.0, inf
        self._failure: GossamerError = closed(papers.me)  # what whoever asks hears, once it is closed
        self.loop = EventLoop()
        self._connections = ConnectionPool(self.loop, papers, habits, self)
        self.loop.watch(listening, EVENT_READ, lambda ready: self._connections.accept(listening))

    def run(self) -> None:
        """Serve until `close` was called and everything that was to be said is said."""
        try:
            while self._close_at == inf or (self._connections.lines and time.monotonic() < self._close_at):
                self.loop.turn(min(self._tick_at, self._close_at))
                if time.monotonic() >= self._tick_at:
                    self.loop.act_alone(self._tick)
        except BaseException as fault:
            self._failure = ConnectError(f"The endpoint of {self._papers.me} cannot go on: {fault!r}.")
            raise
        finally:
            self.loop.act_alone(self._end)

    def traffic(self) -> dict[Peer, Traffic]:
        """May be called by any thread."""
        return {peer: peer_state.traffic for peer, peer_state in list(self._peer_states.items())}

    # -- what scripts want -----------------------------------------------------------------------------

    def ask(self, pendings: Sequence[Pending]) -> None:
        """Send them as soon as there are connections and room in their queues, and again until they are answered."""
        if self._close_at < inf:
            for pending in pendings:
                pending.settle(failure=self._failure)
            return
        asked = [(self._peer_state(pending.peer), pending) for pending in pendings]
        for peer_state, pending in asked:
            peer_state.ask(pending)
        for peer_state in dict.fromkeys(peer_state for peer_state, _ in asked):
            self._feed(peer_state)
            self._dial_if_missed(peer_state)

    def give_up(self, pendings: Sequence[Pending], released: Event) -> None:
        """Nobody waits for them any more; once `released` is set their tensors are not read again."""
        for pending in pendings:
            self._peer_state(pending.peer).give_up(pending)
        released.set()

    def reply(self, asker: Asker, message: Message) -> None:
        """Answer whoever asks, unless it left or was started anew. Answers go past the limit of the queue."""
        peer_state = self._peer_state(asker.peer)
        if peer_state.line is not None and peer_state.instance == asker.instance:
            peer_state.line.send(message)
            self._connections.write(peer_state.line)

    def meet(self, peer: Peer, place: Place) -> None:
        """Know where a peer can be dialled."""
        self._peer_state(peer).place = place
        self._dial_if_missed(self._peer_state(peer))

    def close(self, why: GossamerError | None = None) -> None:
        """Say goodbye to everyone, wait until that has left, and end. why: what whoever waits hears, if not that."""
        if self._close_at < inf:
            return
        self._failure = why or self._failure
        self._close_at = time.monotonic() + self._habits.dead_after_seconds
        self._mailbox.fail(self._failure)
        self.loop.forget(self._listening)
        self._listening.close()
        for peer_state in self._peer_states.values():
            peer_state.fail(self._failure)
        for line in list(self._connections.lines):
            if line.peer is None:
                self._connections.drop(line)
            else:
                line.send(GOODBYE)
                self._connections.write(line)

    def abandon(self) -> None:
        """In a forked child, which has the sockets but no thread that serves them: leave them to the parent."""
        self._mailbox.abandon(closed(self._papers.me))
        self._listening.close()
        self._connections.abandon()
        self.loop.abandon()

    def _end(self) -> None:
        self._mailbox.fail(self._failure)
        self._close_at = -inf  # what is asked from now on fails
        for peer_state in self._peer_states.values():
            peer_state.fail(self._failure)
        self._connections.close()
        self._listening.close()
        self.loop.grant()
        self.loop.close()

    # -- who is here ---------------------------------------------------------------------------------

    def _peer_state(self, peer: Peer) -> PeerState:
        return self._peer_states.setdefault(peer, PeerState(peer))

    def _feed(self, peer_state: PeerState) -> None:
        if peer_state.line is not None:
            peer_state.feed(self._habits.queue_bytes)
            self._connections.write(peer_state.line)

    def _dial_if_missed(self, peer_state: PeerState) -> None:
        place = peer_state.place
        if place is None or not peer_state.wants_a_connection or self._close_at < inf:
            return
        if time.monotonic() < peer_state.dial_at:
            if peer_state.dial_at < self._tick_at:
                self._tick_at = peer_state.dial_at
                self.loop.wake()  # which waits for a later moment
            return
        peer_state.is_dialling = True
        self._connections.dial(peer_state.peer, place, partial(self._opened, peer_state))

    def _opened(self, peer_state: PeerState, line: Connection | None) -> None:
        peer_state.dialling = line
        if line is None:
            peer_state.dial_later(time.monotonic())
            self._dial_if_missed(peer_state)

    def _tick(self) -> None:
        now = time.monotonic()
        self._tick_at = now + self._habits.heartbeat_seconds / 2
        self._connections.check(now)
        for peer_state in list(self._peer_states.values()):
            self._dial_if_missed(peer_state)
            if peer_state.is_gone(now, self._habits.dead_after_seconds):
                self._leave(peer_state)

    def _leave(self, peer_state: PeerState) -> None:
        if peer_state.here:
            peer_state.here = False
            self._mailbox.forget(peer_state.peer)
            self._mailbox.left(peer_state.peer)

    # -- what connections tell -----------------------------------------------------------------------

    def met(self, line: Connection, met: AuthenticatedPeer) -> None:
        peer_state = self._peer_state(met.peer)
        if self._close_at < inf or not peer_state.takes(line, met.instance, self._papers.me):
            self._connections.drop(line)
            if peer_state.dialling is line:
                peer_state.dialling, peer_state.is_dialling = None, False
            return
        for other in (peer_state.line, peer_state.dialling):
            if other is not None and other is not line:
                self._connections.drop(other)
        was_here = peer_state.here and peer_state.instance == met.instance
        peer_state.use(line, met.instance)
        if not was_here:
            self._mailbox.joined(met.peer)
        self._feed(peer_state)

    def heard(self, line: Connection, spoken: ReceivedFrame) -> None:
        assert line.peer is not None
        peer_state = self._peer_states[line.peer]
        peer_state.traffic.received(spoken)
        match spoken.record:
            case PushRecord() | PullRecord() as record:
                op = record.op(self._papers.me, spoken.payload)
                self._mailbox.arrived(Asker(line.peer, peer_state.instance, record.request), op)
                self.loop.afterwards(self._mailbox.wake)
            case ReceiptRecord() | PulledRecord() as record:
                pending = peer_state.answered(record.request)
                if pending is not None:
                    self.loop.afterwards(partial(pending.settle, record.answer(spoken.payload)))
            case _ if spoken.kind is Kind.GOODBYE:
                self._connections.drop(line)
                peer_state.lose(time.monotonic())
                self._leave(peer_state)

    def sent(self, line: Connection, parcels: list[OutgoingMessage]) -> None:
        if line.peer is None:
            return
        peer_state = self._peer_states[line.peer]
        for parcel in parcels:
            peer_state.traffic.sent(parcel.message)
        if peer_state.line is line and peer_state.waiting:
            self._feed(peer_state)

    def lost(self, line: Connection, why: GossamerError) -> None:
        now = time.monotonic()
        if line.peer is not None:
            peer_state = self._peer_states[line.peer]
            if peer_state.line is line:
                peer_state.lose(now)
            if isinstance(why, MalformedError):
                self._notice(f"The connection to {line.peer} is made anew. {why}")
                peer_state.dial_later(now)
            if now - line.heard_at >= self._habits.dead_after_seconds:
                self._leave(peer_state)
            self._dial_if_missed(peer_state)
        elif line.calls is not None:
            self._not_met(self._peer_states[line.calls], why, now)
        elif isinstance(why, (MismatchError, ConnectError)):
            self._notice(f"{self._papers.me} refused a connection. {why}")

    def _not_met(self, peer_state: PeerState, why: GossamerError, now: float) -> None:
        """A call that did not succeed. What will not get better by itself is told to whoever asks."""
        peer_state.dial_later(now)
        peer_state.strikes = peer_state.strikes + 1 if isinstance(why, MalformedError) else 0
        if peer_state.strikes >= STRIKES:
            why = ConnectError(f"At {peer_state.place} somebody answers that is not {peer_state.peer}: {why}")
        if isinstance(why, (MismatchError, ConnectError)):
            peer_state.fail(why)
        self._dial_if_missed(peer_state)

    def _notice(self, message: str) -> None:
        if message not in self._noticed and len(self._noticed) < 100:
            self._noticed.add(message)
            notice(message)

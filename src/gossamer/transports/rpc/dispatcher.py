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
        self, papers: Credentials, listening: socket.socket, letterbox: Mailbox, habits: EndpointOptions
    ) -> None:
        self._papers, self._listening, self._letterbox, self._habits = papers, listening, letterbox, habits
        self._correspondents: dict[Peer, PeerState] = {}
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
        return {peer: correspondent.traffic for peer, correspondent in list(self._correspondents.items())}

    # -- what scripts want -----------------------------------------------------------------------------

    def ask(self, pendings: Sequence[Pending]) -> None:
        """Send them as soon as there are connections and room in their queues, and again until they are answered."""
        if self._close_at < inf:
            for pending in pendings:
                pending.settle(failure=self._failure)
            return
        asked = [(self._correspondent(pending.peer), pending) for pending in pendings]
        for correspondent, pending in asked:
            correspondent.ask(pending)
        for correspondent in dict.fromkeys(correspondent for correspondent, _ in asked):
            self._feed(correspondent)
            self._dial_if_missed(correspondent)

    def give_up(self, pendings: Sequence[Pending], released: Event) -> None:
        """Nobody waits for them any more; once `released` is set their tensors are not read again."""
        for pending in pendings:
            self._correspondent(pending.peer).give_up(pending)
        released.set()

    def reply(self, asker: Asker, message: Message) -> None:
        """Answer whoever asks, unless it left or was started anew. Answers go past the limit of the queue."""
        correspondent = self._correspondent(asker.peer)
        if correspondent.line is not None and correspondent.instance == asker.instance:
            correspondent.line.send(message)
            self._connections.write(correspondent.line)

    def meet(self, peer: Peer, place: Place) -> None:
        """Know where a peer can be dialled."""
        self._correspondent(peer).place = place
        self._dial_if_missed(self._correspondent(peer))

    def close(self, why: GossamerError | None = None) -> None:
        """Say goodbye to everyone, wait until that has left, and end. why: what whoever waits hears, if not that."""
        if self._close_at < inf:
            return
        self._failure = why or self._failure
        self._close_at = time.monotonic() + self._habits.dead_after_seconds
        self._letterbox.fail(self._failure)
        self.loop.forget(self._listening)
        self._listening.close()
        for correspondent in self._correspondents.values():
            correspondent.fail(self._failure)
        for line in list(self._connections.lines):
            if line.peer is None:
                self._connections.drop(line)
            else:
                line.send(GOODBYE)
                self._connections.write(line)

    def abandon(self) -> None:
        """In a forked child, which has the sockets but no thread that serves them: leave them to the parent."""
        self._letterbox.abandon(closed(self._papers.me))
        self._listening.close()
        self._connections.abandon()
        self.loop.abandon()

    def _end(self) -> None:
        self._letterbox.fail(self._failure)
        self._close_at = -inf  # what is asked from now on fails
        for correspondent in self._correspondents.values():
            correspondent.fail(self._failure)
        self._connections.close()
        self._listening.close()
        self.loop.grant()
        self.loop.close()

    # -- who is here ---------------------------------------------------------------------------------

    def _correspondent(self, peer: Peer) -> PeerState:
        return self._correspondents.setdefault(peer, PeerState(peer))

    def _feed(self, correspondent: PeerState) -> None:
        if correspondent.line is not None:
            correspondent.feed(self._habits.queue_bytes)
            self._connections.write(correspondent.line)

    def _dial_if_missed(self, correspondent: PeerState) -> None:
        place = correspondent.place
        if place is None or not correspondent.wants_a_connection or self._close_at < inf:
            return
        if time.monotonic() < correspondent.dial_at:
            if correspondent.dial_at < self._tick_at:
                self._tick_at = correspondent.dial_at
                self.loop.wake()  # which waits for a later moment
            return
        correspondent.is_dialling = True
        self._connections.dial(correspondent.peer, place, partial(self._opened, correspondent))

    def _opened(self, correspondent: PeerState, line: Connection | None) -> None:
        correspondent.dialling = line
        if line is None:
            correspondent.dial_later(time.monotonic())
            self._dial_if_missed(correspondent)

    def _tick(self) -> None:
        now = time.monotonic()
        self._tick_at = now + self._habits.heartbeat_seconds / 2
        self._connections.check(now)
        for correspondent in list(self._correspondents.values()):
            self._dial_if_missed(correspondent)
            if correspondent.is_gone(now, self._habits.dead_after_seconds):
                self._leave(correspondent)

    def _leave(self, correspondent: PeerState) -> None:
        if correspondent.here:
            correspondent.here = False
            self._letterbox.forget(correspondent.peer)
            self._letterbox.left(correspondent.peer)

    # -- what connections tell -----------------------------------------------------------------------

    def met(self, line: Connection, met: AuthenticatedPeer) -> None:
        correspondent = self._correspondent(met.peer)
        if self._close_at < inf or not correspondent.takes(line, met.instance, self._papers.me):
            self._connections.drop(line)
            if correspondent.dialling is line:
                correspondent.dialling, correspondent.is_dialling = None, False
            return
        for other in (correspondent.line, correspondent.dialling):
            if other is not None and other is not line:
                self._connections.drop(other)
        was_here = correspondent.here and correspondent.instance == met.instance
        correspondent.use(line, met.instance)
        if not was_here:
            self._letterbox.joined(met.peer)
        self._feed(correspondent)

    def heard(self, line: Connection, spoken: ReceivedFrame) -> None:
        assert line.peer is not None
        correspondent = self._correspondents[line.peer]
        correspondent.traffic.received(spoken)
        match spoken.record:
            case PushRecord() | PullRecord() as record:
                word = record.word(self._papers.me, spoken.payload)
                self._letterbox.arrived(Asker(line.peer, correspondent.instance, record.request), word)
                self.loop.afterwards(self._letterbox.wake)
            case ReceiptRecord() | PulledRecord() as record:
                pending = correspondent.answered(record.request)
                if pending is not None:
                    self.loop.afterwards(partial(pending.settle, record.answer(spoken.payload)))
            case _ if spoken.kind is Kind.GOODBYE:
                self._connections.drop(line)
                correspondent.lose(time.monotonic())
                self._leave(correspondent)

    def sent(self, line: Connection, parcels: list[OutgoingMessage]) -> None:
        if line.peer is None:
            return
        correspondent = self._correspondents[line.peer]
        for parcel in parcels:
            correspondent.traffic.sent(parcel.message)
        if correspondent.line is line and correspondent.waiting:
            self._feed(correspondent)

    def lost(self, line: Connection, why: GossamerError) -> None:
        now = time.monotonic()
        if line.peer is not None:
            correspondent = self._correspondents[line.peer]
            if correspondent.line is line:
                correspondent.lose(now)
            if isinstance(why, MalformedError):
                self._notice(f"The connection to {line.peer} is made anew. {why}")
                correspondent.dial_later(now)
            if now - line.heard_at >= self._habits.dead_after_seconds:
                self._leave(correspondent)
            self._dial_if_missed(correspondent)
        elif line.calls is not None:
            self._not_met(self._correspondents[line.calls], why, now)
        elif isinstance(why, (MismatchError, ConnectError)):
            self._notice(f"{self._papers.me} refused a connection. {why}")

    def _not_met(self, correspondent: PeerState, why: GossamerError, now: float) -> None:
        """A call that did not succeed. What will not get better by itself is told to whoever asks."""
        correspondent.dial_later(now)
        correspondent.strikes = correspondent.strikes + 1 if isinstance(why, MalformedError) else 0
        if correspondent.strikes >= STRIKES:
            why = ConnectError(f"At {correspondent.place} somebody answers that is not {correspondent.peer}: {why}")
        if isinstance(why, (MismatchError, ConnectError)):
            correspondent.fail(why)
        self._dial_if_missed(correspondent)

    def _notice(self, message: str) -> None:
        if message not in self._noticed and len(self._noticed) < 100:
            self._noticed.add(message)
            notice(message)

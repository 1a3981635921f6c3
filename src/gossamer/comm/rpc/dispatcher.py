"""Dispatcher: routes requests, answers and membership events between the mailbox and the connections of all peers."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from selectors import EVENT_READ
from threading import Event

from gossamer.base.host_port import Address
from gossamer.base.peer_ops import Peer
from gossamer.comm.rpc.connection import Connection, OutgoingMessage
from gossamer.comm.rpc.connections_and_heartbeats import ConnectionPool
from gossamer.comm.rpc.event_loop import EventLoop
from gossamer.comm.rpc.mailbox import Asker, Mailbox, Pending, endpoint_closed
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.tls_sockets import ResolvedAddress
from gossamer.comm.rpc.unanswered_requests import PeerState, Traffic
from gossamer.comm.rpc_protocol.connection_state import ReceivedFrame
from gossamer.comm.rpc_protocol.credentials import AuthenticatedPeer, Credentials
from gossamer.comm.rpc_protocol.frames import Kind, Message
from gossamer.comm.rpc_protocol.messages import GOODBYE, PulledRecord, PullRecord, PushRecord, ReceiptRecord
from gossamer.errors import ConnectError, GossamerError, MalformedError, MismatchError, PeerLost
from gossamer.events import notice

PAUSED_SECONDS = 2.0  # by which a tick is late if this process was stopped
MOST_FAILED_DIALS = 3  # consecutive malformed answers to dials, before pending requests fail
MOST_NOTICES = 100
MOST_DEPARTED = 1024  # peers that have left and whose states are kept
FORGOTTEN = -1  # number of the peer that has the sum of all forgotten ones of its kind in `traffic`


class Dispatcher:
    """Serves all peers of one endpoint. `loop` must run every method except `run` and `traffic`.

    Delivery is at least once: a broken connection is dialed again while requests are unanswered and its peer does not
    count as gone. Unanswered requests are resent with identical bytes.
    """

    def __init__(
        self, credentials: Credentials, listening: socket.socket, mailbox: Mailbox, options: EndpointOptions
    ) -> None:
        self._credentials, self._listening, self._mailbox, self._options = credentials, listening, mailbox, options
        self._peer_states: dict[Peer, PeerState] = {}
        self._departed: dict[Peer, None] = {}  # peers that have left, in that order
        self._forgotten: dict[Peer, Traffic] = {}
        self._noticed: set[str] = set()
        self._tick_at, self._close_at = time.monotonic(), inf
        self.excused_seconds = 0.0  # in which this process was stopped, by which requests have more time
        self._queue_limit_bytes = options.queue_limit_bytes(credentials.largest_frame_bytes)
        self._failure: GossamerError = endpoint_closed(credentials.me)  # raised by all requests after closing
        self.loop = EventLoop()
        self._connections = ConnectionPool(self.loop, credentials, options, self)
        self._listen()

    def _listen(self) -> None:
        self.loop.watch(self._listening, EVENT_READ, self._accept)

    def _accept(self, ready: int) -> None:
        if not self._connections.accept(self._listening):
            self.loop.unwatch(self._listening)  # until the next tick, because the socket stays ready

    def run(self) -> None:
        """Serve until `close` was called and all queued messages are sent."""
        try:
            while self._close_at == inf or (self._connections.connections and time.monotonic() < self._close_at):
                self.loop.run_once(min(self._tick_at, self._close_at))
                if time.monotonic() >= self._tick_at:
                    self.loop.run_exclusively(self._tick)
        except BaseException as fault:
            self._failure = ConnectError(
                f"The endpoint of {self._credentials.me} failed: {fault!r}. All requests fail from now on. See "
                "the traceback of its thread in this process's log."
            )
            raise
        finally:
            self.loop.run_exclusively(self._shut_down)

    def traffic(self) -> dict[Peer, Traffic]:
        """Return the traffic by peer. Thread-safe. Number -1 has the sum of the forgotten peers of its kind."""
        return {peer: each.traffic for peer, each in list(self._peer_states.items())} | self._forgotten

    def address_of(self, peer: Peer) -> Address | None:
        """Return the remote address of a peer's connection; None without one. Thread-safe."""
        peer_state = self._peer_states.get(peer)
        connection = None if peer_state is None else peer_state.connection
        try:
            return None if connection is None else connection.sock.getpeername()[:2]
        except OSError:  # it was closed meanwhile
            return None

    # -- requests and replies of scripts -------------------------------------------------------------------------------

    def ask(self, pendings: Sequence[Pending]) -> None:
        """Send requests as soon as a connection has room in its queue, and resend them until they are answered."""
        if self._close_at < inf:
            for pending in pendings:
                pending.settle(failure=self._failure)
            return
        asked = [(self._peer_state(pending.peer), pending) for pending in pendings]
        for peer_state, pending in asked:
            peer_state.ask(pending)
        for peer_state in dict.fromkeys(peer_state for peer_state, _ in asked):
            if self._options.asks_end_with_peer and peer_state.has_left:
                peer_state.fail(self._peer_lost(peer_state.peer))
            self._fill_queue(peer_state)
            self._dial_if_needed(peer_state)

    def give_up(self, pendings: Sequence[Pending], released: Event) -> None:
        """Cancel requests. Their tensors are not read after `released` is set."""
        for pending in pendings:
            self._peer_state(pending.peer).give_up(pending)
        released.set()

    def reply(self, asker: Asker, message: Message) -> None:
        """Answer a request, unless its process has left or restarted. Answers ignore the queue limit."""
        peer_state = self._peer_state(asker.peer)
        if peer_state.connection is not None and peer_state.instance == asker.instance:
            peer_state.connection.send(message)
            self._connections.write(peer_state.connection)

    def set_address(self, peer: Peer, resolved: ResolvedAddress) -> None:
        """Set the address at which a peer can be dialed."""
        self._peer_state(peer).resolved = resolved
        self._dial_if_needed(self._peer_state(peer))

    def close(self, why: GossamerError | None = None) -> None:
        """Send a goodbye to all peers, wait until it is sent, and end. why: the error of pending requests."""
        if self._close_at < inf:
            return
        self._failure = why or self._failure
        self._close_at = time.monotonic() + self._options.farewell_seconds
        self._mailbox.fail(self._failure)
        self.loop.unwatch(self._listening)
        self._listening.close()
        for peer_state in self._peer_states.values():
            peer_state.fail(self._failure)
        for connection in list(self._connections.connections):
            if connection.peer is None:
                self._connections.drop(connection)
            else:
                connection.send(GOODBYE)
                self._connections.write(connection)

    def abandon(self) -> None:
        """In a forked child, which has no serving thread: close its copies of the sockets."""
        self._mailbox.abandon(endpoint_closed(self._credentials.me))
        self._listening.close()
        self._connections.abandon()
        self.loop.abandon()

    def _shut_down(self) -> None:
        self._mailbox.fail(self._failure)
        self._close_at = -inf  # further requests fail
        for peer_state in self._peer_states.values():
            peer_state.fail(self._failure)
        self._connections.close()
        self._listening.close()
        self.loop.run_tasks()
        self.loop.close()

    # -- membership and dialing ----------------------------------------------------------------------------------------

    def _peer_state(self, peer: Peer) -> PeerState:
        found = self._peer_states.get(peer)
        if found is None:
            found = self._peer_states[peer] = PeerState(peer, self._options.longest_backoff_seconds)
        return found

    def _fill_queue(self, peer_state: PeerState) -> None:
        if peer_state.connection is not None:
            peer_state.fill_queue(self._queue_limit_bytes)
            self._connections.write(peer_state.connection)

    def _dial_if_needed(self, peer_state: PeerState) -> None:
        resolved = peer_state.resolved
        if resolved is None or not peer_state.needs_connection or self._close_at < inf:
            return
        if time.monotonic() < peer_state.redial_at:
            if peer_state.redial_at < self._tick_at:
                self._tick_at = peer_state.redial_at
                self.loop.wake()  # its current wait would end later
            return
        peer_state.is_dialing = True
        self._connections.dial(peer_state.peer, resolved, partial(self._on_dialed, peer_state))

    def _on_dialed(self, peer_state: PeerState, connection: Connection | None) -> None:
        peer_state.dialing = connection
        if connection is None:
            peer_state.dial_later(time.monotonic())
            self._dial_if_needed(peer_state)

    def _tick(self) -> None:
        self.excuse_pause()
        now = time.monotonic()
        self._tick_at = now + min(self._options.beat_seconds, self._options.handshake_seconds) / 2
        if self._close_at == inf:
            self._listen()
        self._connections.check_timeouts(now)
        for peer_state in list(self._peer_states.values()):
            self._dial_if_needed(peer_state)
            if peer_state.is_gone(now, self._options.dead_after_seconds):
                self._peer_left(peer_state)

    def excuse_pause(self) -> None:
        """Do not count time in which this process was stopped, perhaps with its peers, as a silence of theirs."""
        now = time.monotonic()
        if (seconds := now - self._tick_at) <= PAUSED_SECONDS:
            return
        self.excused_seconds += seconds
        self._tick_at = now
        for connection in self._connections.connections:
            connection.last_received_at = min(now, connection.last_received_at + seconds)
        for peer_state in self._peer_states.values():
            if peer_state.disconnected_at < inf:
                peer_state.disconnected_at = min(now, peer_state.disconnected_at + seconds)

    def _peer_left(self, peer_state: PeerState) -> None:
        if peer_state.is_present:
            peer_state.is_present = False
            self._mailbox.forget(peer_state.peer)
            self._mailbox.peer_left(peer_state.peer)
            if self._options.asks_end_with_peer:
                peer_state.fail(self._peer_lost(peer_state.peer))
            self._departed[peer_state.peer] = None
            if len(self._departed) > MOST_DEPARTED:
                self._forget_departed(next(iter(self._departed)))

    def _forget_departed(self, peer: Peer) -> None:
        """Forget a peer that has left, unless it is dialed or requests wait for it: each process is a new peer."""
        del self._departed[peer]
        peer_state = self._peer_states[peer]
        if peer_state.resolved is None and peer_state.connection is None and not peer_state.outstanding:
            del self._peer_states[peer]
            total = self._forgotten.setdefault(Peer(peer.kind, FORGOTTEN), Traffic())
            total.add(peer_state.traffic)

    def _peer_lost(self, peer: Peer) -> PeerLost:
        return PeerLost(
            f"{peer} has left, or was silent towards {self._credentials.me} for "
            f"{self._options.dead_after_seconds:g} s, so it is unknown whether it executed the request. Check its "
            "log for why it ended."
        )

    # -- callbacks of connections --------------------------------------------------------------------------------------

    def connection_made(self, connection: Connection, met: AuthenticatedPeer) -> None:
        take = self._options.hand_over.get(met.peer.kind)
        if take is not None and not connection.is_outbound:
            take(self._connections.release(connection))
            return
        peer_state = self._peer_state(met.peer)
        if self._close_at < inf or not peer_state.prefers(connection, met.instance, self._credentials.me):
            self._connections.drop(connection)
            if peer_state.dialing is connection:
                peer_state.dialing, peer_state.is_dialing = None, False
            return
        for other in (peer_state.connection, peer_state.dialing):
            if other is not None and other is not connection:
                self._connections.drop(other)
        was_here = peer_state.is_present and peer_state.instance == met.instance
        peer_state.use_connection(connection, met.instance)
        self._departed.pop(met.peer, None)
        if not was_here:
            self._mailbox.peer_joined(met.peer)
        self._fill_queue(peer_state)

    def frame_received(self, connection: Connection, frame: ReceivedFrame) -> None:
        assert connection.peer is not None
        peer_state = self._peer_states[connection.peer]
        peer_state.traffic.received(frame)
        match frame.record:
            case PushRecord() | PullRecord() as record:
                self._check_asks(connection.peer)
                op = record.op(self._credentials.me, frame.payload)
                self._mailbox.deliver(Asker(connection.peer, peer_state.instance, record.request), op)
                self.loop.call_after(self._mailbox.wake)
            case ReceiptRecord() | PulledRecord() as record:
                pending = peer_state.take_answered(record.request)
                if pending is not None:
                    self.loop.call_after(partial(pending.settle, record.answer(frame.payload)))
            case _ if frame.kind is Kind.GOODBYE:
                self._connections.drop(connection)
                peer_state.lose_connection(time.monotonic())
                self._peer_left(peer_state)

    def _check_asks(self, peer: Peer) -> None:
        most = self._options.most_asks
        if most is not None and self._mailbox.unanswered(peer) >= most:
            raise MalformedError(f"{peer} exceeded the limit of {most} unanswered requests.")

    def messages_sent(self, connection: Connection, sent: list[OutgoingMessage]) -> None:
        if connection.peer is None:
            return
        peer_state = self._peer_states[connection.peer]
        for outgoing in sent:
            peer_state.traffic.sent(outgoing.message)
        if peer_state.connection is connection and peer_state.waiting:
            self._fill_queue(peer_state)

    def connection_lost(self, connection: Connection, why: GossamerError) -> None:
        now = time.monotonic()
        if connection.peer is not None:
            peer_state = self._peer_states[connection.peer]
            if peer_state.connection is connection:
                peer_state.lose_connection(now)
            if isinstance(why, MalformedError):
                self._notice(f"The connection to {connection.peer} is opened again. {why}")
                peer_state.dial_later(now)
            is_silent = now - connection.last_received_at >= self._options.dead_after_seconds
            if is_silent or (self._options.gone_when_closed and peer_state.connection is None):
                self._peer_left(peer_state)
            self._dial_if_needed(peer_state)
        elif connection.dialed_peer is not None:
            self._dial_failed(self._peer_states[connection.dialed_peer], why, now)
        elif isinstance(why, (MismatchError, ConnectError)):
            self._notice(f"{self._credentials.me} refused a connection. {why}")

    def _dial_failed(self, peer_state: PeerState, why: GossamerError, now: float) -> None:
        """Record a failed dial. A permanent cause fails all requests to that peer."""
        peer_state.dial_later(now)
        peer_state.failed_dials = peer_state.failed_dials + 1 if isinstance(why, MalformedError) else 0
        if peer_state.failed_dials >= MOST_FAILED_DIALS:
            why = ConnectError(f"The program at {_where(peer_state)} is not {peer_state.peer}: {why}")
        if isinstance(why, (MismatchError, ConnectError)):
            peer_state.fail(why)
        self._dial_if_needed(peer_state)

    def _notice(self, message: str) -> None:
        if message not in self._noticed and len(self._noticed) < MOST_NOTICES:
            self._noticed.add(message)
            notice(message)


def _where(peer_state: PeerState) -> str:
    if peer_state.resolved is None:
        return "an unknown address"
    host, port = peer_state.resolved.address
    return f"{host}:{port}"

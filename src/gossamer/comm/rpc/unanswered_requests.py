"""Peer state: connection, unanswered requests, redial backoff and traffic of one peer."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import inf
from random import Random

from gossamer.base.peer_ops import Peer
from gossamer.comm.rpc.connection import Connection, OutgoingMessage
from gossamer.comm.rpc.mailbox import Pending
from gossamer.comm.rpc.tls_sockets import ResolvedAddress
from gossamer.comm.rpc_protocol.connection_state import ReceivedFrame
from gossamer.comm.rpc_protocol.frames import Message
from gossamer.errors import GossamerError

FIRST_BACKOFF_SECONDS = 0.02
_jitter = Random()  # separate from the global generator, which belongs to the user's script


@dataclass
class Traffic:
    """Bytes of completely sent and received frames, including resends. All bytes except tensors are overhead."""

    payload_bytes_sent: int = 0
    overhead_bytes_sent: int = 0
    payload_bytes_received: int = 0
    overhead_bytes_received: int = 0
    blocked_seconds: float = 0.0  # total time that requests waited for room in the send queue
    reconnects: int = 0  # connections that replaced an earlier one

    def sent(self, message: Message) -> None:
        self.payload_bytes_sent += message.payload_bytes
        self.overhead_bytes_sent += message.frame_bytes - message.payload_bytes

    def add(self, other: Traffic) -> None:
        """Add the traffic of another peer."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def received(self, frame: ReceivedFrame) -> None:
        self.payload_bytes_received += frame.payload_bytes
        self.overhead_bytes_received += frame.frame_bytes - frame.payload_bytes


@dataclass(eq=False)
class PeerState:
    """A peer as the serving thread knows it. Times are those of time.monotonic."""

    peer: Peer
    longest_backoff_seconds: float = 0.5
    resolved: ResolvedAddress | None = None  # address to dial
    connection: Connection | None = None  # the authenticated connection in use
    is_dialing: bool = False
    dialing: Connection | None = None  # dialed and not yet authenticated
    instance: bytes = b""  # identity of its process at the last authentication
    is_present: bool = False  # it has joined and does not count as gone
    disconnected_at: float = inf  # when its last connection broke; inf while connected
    redial_at: float = 0.0
    failed_dials: int = 0  # consecutive malformed answers to dials
    traffic: Traffic = field(default_factory=Traffic)
    outstanding: dict[int, Pending] = field(default_factory=dict)  # unanswered requests by number
    waiting: deque[Pending] = field(default_factory=deque)  # those not yet queued on a connection, in order
    _backoff_seconds: float = FIRST_BACKOFF_SECONDS
    _outgoing: dict[int, OutgoingMessage] = field(default_factory=dict)

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, pending: Pending) -> None:
        self.outstanding[pending.request] = pending
        self.waiting.append(pending)

    def fill_queue(self, most_bytes: int) -> None:
        """Queue waiting requests up to `most_bytes` in the send queue. A larger message is queued alone."""
        connection = self.connection
        if connection is None:
            return
        while self.waiting:
            pending = self.waiting[0]
            nbytes = pending.message.frame_bytes
            if connection.queued_bytes and connection.queued_bytes + nbytes > most_bytes:
                pending.blocked_at = pending.blocked_at or time.monotonic()
                return
            self.waiting.popleft()
            if pending.blocked_at:
                self.traffic.blocked_seconds += time.monotonic() - pending.blocked_at
                pending.blocked_at = 0.0
            self._outgoing[pending.request] = connection.send(pending.message)

    def take_answered(self, request: int) -> Pending | None:
        """Return the request that an answer settles; None if it was cancelled."""
        self._withdraw(request)
        return self.outstanding.pop(request, None)

    def give_up(self, pending: Pending) -> None:
        """Cancel a request. If it is partially sent, the rest is sent from a copy."""
        if self.outstanding.pop(pending.request, None) is None:
            return
        self._withdraw(pending.request)
        with suppress(ValueError):
            self.waiting.remove(pending)

    def fail(self, failure: GossamerError) -> None:
        """Fail all outstanding requests."""
        for pending in list(self.outstanding.values()):
            self.give_up(pending)
            pending.settle(failure=failure)

    def _withdraw(self, request: int) -> None:
        """Stop reading a request's tensors: an answer may arrive while the request is being resent."""
        outgoing = self._outgoing.pop(request, None)
        if outgoing is not None and self.connection is not None:
            self.connection.withdraw(outgoing)

    # -- connections ---------------------------------------------------------------------------------------------------

    def prefers(self, connection: Connection, instance: bytes, me: Peer) -> bool:
        """Whether a new connection replaces the one in use.

        If both processes dialed at once, both keep the connection that the smaller peer dialed. A later connection
        from the same end, or from a restarted process, means that the old connection is broken.
        """
        if (
            self.connection is None
            or instance != self.instance
            or connection.is_outbound == self.connection.is_outbound
        ):
            return True
        return connection.is_outbound == (me < self.peer)

    def use_connection(self, connection: Connection, instance: bytes) -> None:
        self.traffic.reconnects += bool(self.instance)
        self.connection, self.instance, self.disconnected_at, self.is_present = connection, instance, inf, True
        self.is_dialing, self.dialing = False, None
        self.failed_dials, self._backoff_seconds = 0, FIRST_BACKOFF_SECONDS
        self.resend_all()

    def resend_all(self) -> None:
        """Queue all outstanding requests again, because those sent on the last connection may not have arrived."""
        self.waiting = deque(self.outstanding.values())
        self._outgoing.clear()

    def lose_connection(self, now: float) -> None:
        self.connection, self.disconnected_at = None, now
        self.redial_at = now
        self.resend_all()

    @property
    def needs_connection(self) -> bool:
        """Whether a connection is missing and not being dialed."""
        return self.connection is None and not self.is_dialing and bool(self.outstanding or self.is_present)

    @property
    def has_left(self) -> bool:
        """Whether it was present and counts as gone."""
        return bool(self.instance) and not self.is_present

    def dial_later(self, now: float) -> None:
        self.is_dialing, self.dialing = False, None
        # Random, so that peers that lost the same server do not all reconnect at the same time.
        self.redial_at = now + self._backoff_seconds * _jitter.uniform(0.5, 1.0)
        self._backoff_seconds = min(2 * self._backoff_seconds, self.longest_backoff_seconds)

    def is_gone(self, now: float, dead_after_seconds: float) -> bool:
        return self.is_present and now - self.disconnected_at >= dead_after_seconds

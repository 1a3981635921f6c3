"""One other peer, as the thread that serves the connections knows it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from gossamer.core.peer_ops import Peer
from gossamer.errors import GossamerError
from gossamer.transports.rpc.connection import Connection, OutgoingMessage
from gossamer.transports.rpc.mailbox import Pending
from gossamer.transports.rpc.sockets import Place
from gossamer.transports.wire.connection_state import ReceivedFrame
from gossamer.transports.wire.frames import Message

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.02, 0.5


@dataclass
class Traffic:
    """Bytes of frames that went and came whole, also those sent again; headers and control records are overhead.

    blocked_seconds: how long asks waited, all together, for room in the queue of bytes to be sent.
    reconnects: how often a connection took the place of one that had been there.
    """

    payload_bytes_sent: int = 0
    overhead_bytes_sent: int = 0
    payload_bytes_received: int = 0
    overhead_bytes_received: int = 0
    blocked_seconds: float = 0.0
    reconnects: int = 0

    def sent(self, message: Message) -> None:
        self.payload_bytes_sent += message.payload_bytes
        self.overhead_bytes_sent += message.frame_bytes - message.payload_bytes

    def received(self, spoken: ReceivedFrame) -> None:
        self.payload_bytes_received += spoken.payload_bytes
        self.overhead_bytes_received += spoken.frame_bytes - spoken.payload_bytes


@dataclass(eq=False)
class PeerState:
    """outstanding: asks by number, until they are answered; waiting: those that no connection has taken yet, in order.

    here: it was heard, and does not count as gone. lost_at: when its last connection broke; inf while it has one.
    """

    peer: Peer
    place: Place | None = None
    line: Connection | None = None
    is_dialling: bool = False
    dialling: Connection | None = None
    instance: bytes = b""
    here: bool = False
    lost_at: float = inf
    dial_at: float = 0.0
    strikes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    outstanding: dict[int, Pending] = field(default_factory=dict)
    waiting: deque[Pending] = field(default_factory=deque)
    _backoff_seconds: float = FIRST_BACKOFF_SECONDS
    _parcels: dict[int, OutgoingMessage] = field(default_factory=dict)

    # -- asks ------------------------------------------------------------------------------------------

    def ask(self, pending: Pending) -> None:
        self.outstanding[pending.request] = pending
        self.waiting.append(pending)

    def feed(self, most_bytes: int) -> None:
        """Queue what waits, as long as no more than `most_bytes` are queued; a larger message goes alone."""
        line = self.line
        if line is None:
            return
        while self.waiting:
            pending = self.waiting[0]
            nbytes = pending.message.frame_bytes
            if line.queued_bytes and line.queued_bytes + nbytes > most_bytes:
                pending.held_back_at = pending.held_back_at or time.monotonic()
                return
            self.waiting.popleft()
            if pending.held_back_at:
                self.traffic.blocked_seconds += time.monotonic() - pending.held_back_at
                pending.held_back_at = 0.0
            self._parcels[pending.request] = line.send(pending.message)

    def answered(self, request: int) -> Pending | None:
        """Whom an answer is for; None where nobody waits for it any more."""
        self._take_back(request)
        return self.outstanding.pop(request, None)

    def give_up(self, pending: Pending) -> None:
        """Do not ask, or not again; what was half sent goes on from a copy."""
        if self.outstanding.pop(pending.request, None) is None:
            return
        self._take_back(pending.request)
        with suppress(ValueError):
            self.waiting.remove(pending)

    def fail(self, failure: GossamerError) -> None:
        """Tell everyone who waits for an answer."""
        for pending in list(self.outstanding.values()):
            self.give_up(pending)
            pending.settle(failure=failure)

    def _take_back(self, request: int) -> None:
        """Its tensors belong to whoever asked from now on: an answer may come while the same is being said again."""
        parcel = self._parcels.pop(request, None)
        if parcel is not None and self.line is not None:
            self.line.take_back(parcel)

    # -- connections -----------------------------------------------------------------------------------

    def takes(self, line: Connection, instance: bytes, me: Peer) -> bool:
        """Whether a new connection is to be used, rather than the one that is there.

        Of two that the same processes dialled at once, both ends keep the one that the smaller peer dialled; what the
        same end dialled later, or was dialled by a process started anew, is there because the other is broken.
        """
        if self.line is None or instance != self.instance or line.dialled == self.line.dialled:
            return True
        return line.dialled == (me < self.peer)

    def use(self, line: Connection, instance: bytes) -> None:
        self.traffic.reconnects += bool(self.instance)
        self.line, self.instance, self.lost_at, self.here = line, instance, inf, True
        self.is_dialling, self.dialling = False, None
        self.strikes, self._backoff_seconds = 0, FIRST_BACKOFF_SECONDS
        self.ask_again()

    def ask_again(self) -> None:
        """Whatever was said through the last connection may not have arrived."""
        self.waiting = deque(self.outstanding.values())
        self._parcels.clear()

    def lose(self, now: float) -> None:
        self.line, self.lost_at = None, now
        self.dial_at = now
        self.ask_again()

    @property
    def wants_a_connection(self) -> bool:
        """Nobody has dialled it yet, and it is missed."""
        return self.line is None and not self.is_dialling and bool(self.outstanding or self.here)

    def dial_later(self, now: float) -> None:
        self.is_dialling, self.dialling = False, None
        self.dial_at = now + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, LAST_BACKOFF_SECONDS)

    def is_gone(self, now: float, dead_after_seconds: float) -> bool:
        return self.here and now - self.lost_at >= dead_after_seconds

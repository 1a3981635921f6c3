"""Mailbox: passes events and answers from the serving thread to the script threads. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from math import inf

from gossamer.base.peer_ops import Answer, Arrived, Ask, Elapsed, Peer, PeerEvent, PeerJoined, PeerLeft
from gossamer.comm.rpc_protocol.frames import Message
from gossamer.errors import GossamerError, PeerLost


class Batch:
    """Requests that one thread issued together. It waits until all are settled or one has failed."""

    def __init__(self, size: int) -> None:
        self._unsettled = size
        self._failure: GossamerError | None = None
        self._all_settled = threading.Lock()  # released when the wait is over: the cheapest wake-up
        if size:
            self._all_settled.acquire()

    def wait(self, until: float) -> bool:
        """Whether all are answered before `until` on time.monotonic's clock. Raises the first failure."""
        seconds = _seconds_until(until)
        if not self._all_settled.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._all_settled.release()
        if self._failure is not None:
            raise self._failure
        return True

    def settle(self, failure: GossamerError | None = None) -> None:
        """Settle one request. Called once per request, by one thread at a time."""
        self._unsettled -= 1
        if self._failure is None and (failure or not self._unsettled):
            self._failure = failure
            self._all_settled.release()


@dataclass(eq=False)
class Pending:
    """A request that waits for its answer."""

    peer: Peer
    request: int  # number of the request
    message: Message
    until: float  # on time.monotonic's clock
    batch: Batch
    answer: Answer | None = None
    blocked_at: float = 0.0  # since when it has waited for room in the send queue; 0 if it has not
    settled: bool = False

    def settle(self, answer: Answer | None = None, failure: GossamerError | None = None) -> None:
        if not self.settled:
            self.settled, self.answer = True, answer
            self.batch.settle(failure)


@dataclass(frozen=True)
class Asker:
    """The sender of a request, which receives the Reply."""

    peer: Peer
    instance: bytes  # of its process
    request: int  # the sender's number of the request


class Mailbox:
    """Events that no script has taken yet, and the sender for each token."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[PeerEvent] = deque()
        self._askers: dict[int, Asker] = {}
        self._tokens_of: dict[Peer, set[int]] = {}  # of unanswered requests; no empty sets
        self._undelivered: set[Asker] = set()
        self._tokens = count()
        self._requests = count()
        self._failure: GossamerError | None = None

    def next_request(self) -> int:
        return next(self._requests)

    # -- called by the serving thread ----------------------------------------------------------------------------------

    def deliver(self, asker: Asker, op: Ask) -> None:
        """Queue a request as an event; call `wake` afterwards. A duplicate of a queued request is dropped."""
        with self._changed:
            if asker in self._undelivered:
                return
            token = next(self._tokens)
            self._askers[token] = asker
            self._tokens_of.setdefault(asker.peer, set()).add(token)
            self._undelivered.add(asker)
            self._events.append(Arrived(moment=time.monotonic(), token=token, sender=asker.peer, op=op))

    def unanswered(self, peer: Peer) -> int:
        """Return the number of unanswered requests of a peer."""
        return len(self._tokens_of.get(peer, ()))

    def wake(self) -> None:
        """Wake threads that wait for events."""
        with self._changed:
            self._changed.notify(len(self._events))

    def peer_joined(self, peer: Peer) -> None:
        with self._changed:
            self._append(PeerJoined(moment=time.monotonic(), peer=peer))

    def peer_left(self, peer: Peer) -> None:
        with self._changed:
            self._append(PeerLeft(moment=time.monotonic(), peer=peer))

    def forget(self, peer: Peer) -> None:
        """Drop the requests of a peer that has left."""
        with self._changed:
            for token in self._tokens_of.pop(peer, ()):
                self._undelivered.discard(self._askers.pop(token))

    def fail(self, failure: GossamerError) -> None:
        """Raise `failure` in every thread that waits for an event, now or later."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def abandon(self, failure: GossamerError) -> None:
        """As `fail`, in a forked child, where a thread that does not exist may hold the lock."""
        self._changed = threading.Condition()
        self._failure = failure

    def _append(self, event: PeerEvent) -> None:
        self._events.append(event)
        self._changed.notify()

    # -- called by script threads --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def next_event(self, until: float | None) -> PeerEvent:
        """Return the oldest queued event, or Elapsed at the time `until`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._failure, _seconds_until(inf if until is None else until)
            )
            self.check_open()
            if not self._events:
                return Elapsed(moment=time.monotonic())
            event = self._events.popleft()
            if isinstance(event, Arrived) and event.token in self._askers:
                self._undelivered.discard(self._askers[event.token])
            return event

    def take_asker(self, token: int) -> Asker | None:
        """Return the sender for a token, once."""
        with self._changed:
            asker = self._askers.pop(token, None)
            if asker is not None:
                tokens = self._tokens_of[asker.peer]
                tokens.discard(token)
                if not tokens:
                    del self._tokens_of[asker.peer]
            return asker


def endpoint_closed(me: Peer) -> PeerLost:
    return PeerLost(
        f"The endpoint of {me} was closed. Close a session after its last step, and an endpoint after its last request."
    )


def _seconds_until(moment: float) -> float | None:
    return None if moment == inf else min(max(0.0, moment - time.monotonic()), threading.TIMEOUT_MAX)

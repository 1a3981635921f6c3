"""Where the threads that speak and the thread that serves the connections meet. Every method may be called by any."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from math import inf

from gossamer.core.peer_ops import Answer, Arrived, Ask, Elapsed, Peer, PeerEvent, PeerJoined, PeerLeft
from gossamer.errors import GossamerError, PeerLost
from gossamer.transports.wire.frames import Message


class Batch:
    """Asks that were said at once by one thread, which waits until all are settled or one has failed."""

    def __init__(self, size: int) -> None:
        self._unsettled = size
        self._failure: GossamerError | None = None
        self._waits = threading.Lock()  # free once there is nothing to wait for: the cheapest thing to wake up by
        if size:
            self._waits.acquire()

    def wait(self, until: float) -> bool:
        """Whether all are answered, by `until` on time.monotonic's clock. Raises the first failure."""
        seconds = _seconds_until(until)
        if not self._waits.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._waits.release()
        if self._failure is not None:
            raise self._failure
        return True

    def settle(self, failure: GossamerError | None = None) -> None:
        """To be said once for each, by one thread at a time."""
        self._unsettled -= 1
        if self._failure is None and (failure or not self._unsettled):
            self._failure = failure
            self._waits.release()


@dataclass(eq=False)
class Pending:
    """An ask that waits for its answer. until: on time.monotonic's clock."""

    peer: Peer
    request: int
    message: Message
    until: float
    batch: Batch
    answer: Answer | None = None
    held_back_at: float = 0.0
    settled: bool = False

    def settle(self, answer: Answer | None = None, failure: GossamerError | None = None) -> None:
        if not self.settled:
            self.settled, self.answer = True, answer
            self.batch.settle(failure)


@dataclass(frozen=True)
class Asker:
    """Who waits for a Reply: one start of a peer's process, under a number of its own."""

    peer: Peer
    instance: bytes
    request: int


class Mailbox:
    """What was heard and nobody took yet, and who waits for which token's answer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heard: deque[PeerEvent] = deque()
        self._askers: dict[int, Asker] = {}
        self._unopened: set[Asker] = set()
        self._tokens = count()
        self._requests = count()
        self._failure: GossamerError | None = None

    def next_request(self) -> int:
        return next(self._requests)

    # -- said by the thread that serves the connections -------------------------------------------

    def arrived(self, asker: Asker, op: Ask) -> None:
        """Somebody asks: `wake` is to follow. What comes twice is kept once, as long as nobody has heard it."""
        with self._changed:
            if asker in self._unopened:
                return
            token = next(self._tokens)
            self._askers[token] = asker
            self._unopened.add(asker)
            self._heard.append(Arrived(moment=time.monotonic(), token=token, sender=asker.peer, op=op))

    def wake(self) -> None:
        """Let those who wait hear what has arrived."""
        with self._changed:
            self._changed.notify(len(self._heard))

    def joined(self, peer: Peer) -> None:
        with self._changed:
            self._hear(PeerJoined(moment=time.monotonic(), peer=peer))

    def left(self, peer: Peer) -> None:
        with self._changed:
            self._hear(PeerLeft(moment=time.monotonic(), peer=peer))

    def forget(self, peer: Peer) -> None:
        """It left: nobody waits for answers to what it had asked."""
        with self._changed:
            self._askers = {token: asker for token, asker in self._askers.items() if asker.peer != peer}
            self._unopened = {asker for asker in self._unopened if asker.peer != peer}

    def fail(self, failure: GossamerError) -> None:
        """Whoever waits, or will, hears this."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def abandon(self, failure: GossamerError) -> None:
        """The same in a forked child, where the lock may be held by a thread that does not exist."""
        self._changed = threading.Condition()
        self._failure = failure

    def _hear(self, heard: PeerEvent) -> None:
        self._heard.append(heard)
        self._changed.notify()

    # -- said by threads that run scripts ----------------------------------------------------------

    def check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def hear(self, until: float | None) -> PeerEvent:
        """The oldest event nobody heard; Elapsed where there is none by `until`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._heard or self._failure, _seconds_until(inf if until is None else until)
            )
            self.check_open()
            if not self._heard:
                return Elapsed(moment=time.monotonic())
            heard = self._heard.popleft()
            if isinstance(heard, Arrived) and heard.token in self._askers:
                self._unopened.discard(self._askers[heard.token])
            return heard

    def asker(self, token: int) -> Asker | None:
        """Who waits for this token's answer, once."""
        with self._changed:
            return self._askers.pop(token, None)


def closed(me: Peer) -> PeerLost:
    return PeerLost(f"The endpoint of {me} was closed, so nobody hears it any more.")


def _seconds_until(moment: float) -> float | None:
    return None if moment == inf else min(max(0.0, moment - time.monotonic()), threading.TIMEOUT_MAX)

"""Peer watch: waits for what is never done once a peer is gone, as a GPU's work is, and notices that one is.

An engine between devices says nothing to this machine while it waits, so its work is asked for, and its peers are,
by turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn, Protocol

GRACE_SECONDS = 1.0  # from when a peer has hung up: it may have done its part before, and ours is not done yet
SHORTEST_SECONDS, LONGEST_SECONDS = 2e-5, 1e-3  # between two looks


class Peers(Protocol):
    """The other ranks of a group, as something knows of them that does not wait for them."""

    def hung_up(self) -> bool:
        """Whether any has left. Raises PeerLost where this rank has left them, in another thread."""

    def break_off(self, why: str) -> NoReturn:
        """Leave the group, and raise PeerLost: it names who has left; where nobody is known to have, it says why."""


class PeerWatch:
    """How one rank waits, as long as all peers are there."""

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._peers, self._clock, self._sleep = peers, clock, sleep

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether it was done in so many seconds. Raises PeerLost where it is not, GRACE_SECONDS after a peer left."""
        end, pause, noticed = self._clock() + seconds, SHORTEST_SECONDS, False
        while not done():
            if not noticed and self._peers.hung_up():
                noticed, end = True, self._clock() + GRACE_SECONDS
            if self._clock() >= end:
                if noticed:
                    self._peers.break_off("")
                return False
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
        return True

    def break_off(self, why: str) -> NoReturn:
        """Peers.break_off of those that are watched."""
        self._peers.break_off(why)

    def blame(self, why: str) -> NoReturn:
        """Raise PeerLost where the engine says that the group broke, which it may know before anybody's hanging up is
        seen here: whoever does so within GRACE_SECONDS is named."""
        end = self._clock() + GRACE_SECONDS
        while not self._peers.hung_up() and self._clock() < end:
            self._sleep(LONGEST_SECONDS)
        self._peers.break_off(why)


def first_line(failure: BaseException) -> str:
    """What an engine says went wrong, which may go on for pages."""
    return (str(failure).splitlines() or [type(failure).__name__])[0]

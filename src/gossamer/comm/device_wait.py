"""Device wait: waits for work that never completes if a peer is lost, such as a GPU collective, and detects the loss.

A GPU engine does not notify the host while it waits. Its work and the peers are therefore polled alternately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn, Protocol

GRACE_SECONDS = 1.0  # after a peer has disconnected: it may have finished its part, and ours may still complete
SHORTEST_SECONDS, LONGEST_SECONDS = 2e-5, 1e-3  # between two polls
PAUSED_SECONDS = 2.0  # between two polls: this process was stopped, and the time does not count


class Peers(Protocol):
    """The other ranks of a group, as reported by a channel that does not block on them."""

    def hung_up(self) -> bool:
        """Whether any peer has left. Raises PeerLost if another thread of this rank has closed the group."""

    def break_off(self, why: str) -> NoReturn:
        """Leave the group, and raise PeerLost with the rank that has left, or `why` if none is known."""


class DeviceWait:
    """Waits of one rank that end when a peer is lost."""

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._peers, self._clock, self._sleep = peers, clock, sleep

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Poll until done; False after `seconds`. Raises PeerLost if it is not done GRACE_SECONDS after a peer left."""
        now = self._clock()
        end, pause, noticed = now + seconds, SHORTEST_SECONDS, False
        while not done():
            polled, now = now, self._clock()
            if now - polled > PAUSED_SECONDS:
                end += now - polled
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
        """Call Peers.break_off of the watched peers."""
        self._peers.break_off(why)

    def blame(self, why: str) -> NoReturn:
        """Raise PeerLost for an engine's error. The engine may detect a loss before the peers do, so wait up to
        GRACE_SECONDS for a peer to disconnect, and name it."""
        end = self._clock() + GRACE_SECONDS
        while not self._peers.hung_up() and self._clock() < end:
            self._sleep(LONGEST_SECONDS)
        self._peers.break_off(why)

"""Connection candidates: the connections by which one end tries to reach a member, and the one that it uses. Sans-IO.

    seconds   candidates                              opened by
    0         the other member's listening address    the caller
    0.25      all addresses of the other member,      both ends, so that each opens its own router (hole punching)
              from the own listening port
    1         every relay                             both ends

Later candidates begin only while no earlier one has succeeded, as in Happy Eyeballs (Schinazi & Pauly 2017, RFC 8305).
The caller alone decides: it proves itself on one connection at a time, the best one of those on which the other member
is present, and the called end uses the connection on which it receives that proof. So both ends use the same one,
although several are open. All relays are dialed at the same time, so the one with the shortest round trip is first.

source: hole punching (Ford, Srisuresh & Kegel 2005, USENIX ATC)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any


class Approach(IntEnum):
    """Kinds of connections, the best one first."""

    DIRECT = 0
    PUNCHED = 1  # from the own listening port
    RELAYED = 2


BEGIN_SECONDS = {Approach.DIRECT: 0.0, Approach.PUNCHED: 0.25, Approach.RELAYED: 1.0}
# First pause before another attempt, and the longest
AGAIN_SECONDS = {Approach.DIRECT: 0.05, Approach.PUNCHED: 0.05, Approach.RELAYED: 3.0}
MOST_AGAIN_SECONDS = {Approach.DIRECT: 1.0, Approach.PUNCHED: 1.0, Approach.RELAYED: 3.0}
PROOF_SECONDS = 5.0  # for the answer to a proof, if there is another connection
LONE_PROOF_SECONDS = 30.0  # the same without another connection
MOST_KNOCKS = 4  # accepted connections of one member on which this end is the caller


@dataclass(eq=False)
class ConnectionCandidate:
    """One possible connection. open: opens it; None for a connection that this end has accepted."""

    way: Approach
    open: Callable[[], Any] | None
    due: float = inf  # when to open it; infinite while an attempt is in progress
    pause: float = field(init=False)

    def __post_init__(self) -> None:
        self.pause = AGAIN_SECONDS[self.way]


class ConnectionCandidates:
    """The candidates of one end for one other member, until one of them is used.

    Report every attempt that `due` returns as `failed`, or as `present` once the other member is there.
    """

    def __init__(self, candidates: Iterable[ConnectionCandidate], now: float) -> None:
        self._all = list(candidates)
        self._present: list[ConnectionCandidate] = []
        self._knocks: set[ConnectionCandidate] = set()
        self.proving: ConnectionCandidate | None = None
        self._proved_at = inf
        for each in self._all:
            each.due = now + BEGIN_SECONDS[each.way]

    def due(self, now: float) -> list[ConnectionCandidate]:
        """Candidates to open now."""
        found = [each for each in self._all if each.due <= now]
        for each in found:
            each.due = inf
        return found

    def failed(self, candidate: ConnectionCandidate, now: float) -> None:
        """A connection was not opened, or was closed. It is opened again after a pause."""
        if candidate in self._present:
            self._present.remove(candidate)
        if self.proving is candidate:
            self.proving = None
        self._knocks.discard(candidate)
        if candidate.open is not None:
            candidate.due = now + candidate.pause
            candidate.pause = min(2 * candidate.pause, MOST_AGAIN_SECONDS[candidate.way])

    def knocked(self) -> ConnectionCandidate | None:
        """A candidate for a connection that the other member has opened; None if it has opened too many."""
        if len(self._knocks) >= MOST_KNOCKS:
            return None
        self._knocks.add(candidate := ConnectionCandidate(Approach.PUNCHED, None))
        return candidate

    def present(self, candidate: ConnectionCandidate) -> None:
        """The other member is present on a connection of the caller, and waits for a proof."""
        self._present.append(candidate)

    def to_prove(self, now: float) -> ConnectionCandidate | None:
        """The connection on which the caller proves itself now; None while another proof is in progress."""
        if self.proving is not None or not self._present:
            return None
        # The first one of the best kind; anybody could have opened a connection that this end has accepted
        self.proving = min(self._present, key=lambda each: (each.way, each.open is None))
        self._present.remove(self.proving)
        self._proved_at = now
        return self.proving

    def overdue(self, now: float) -> ConnectionCandidate | None:
        """The connection on which a proof was not answered in time.

        A member in an earlier meeting keeps the proof for the next one, so without another connection it waits longer.
        """
        limit = PROOF_SECONDS if self._present else LONE_PROOF_SECONDS
        return self.proving if self.proving is not None and now >= self._proved_at + limit else None

"""Roster: keeps which devices are there, which wait for a task, which have one, and which have reported.

A device is *ready* while it waits, is here and has no assignment; it is *training* from its assignment until its
report, as long as it is here. What an event costs does not grow with the number of devices that it does not concern,
but for a shift in a sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from gossamer.base.peer_ops import Pull

MOST_ASKS = 16  # of one device that are held; the oldest are of connections that broke


@dataclass(frozen=True)
class Assignment:
    """A task that a device was given."""

    round: int
    first: int  # the version that it was given with
    version: int  # the last that it was given with: a device that was restarted asks again
    moment: float = 0.0  # when it was given


@dataclass(frozen=True)
class RosterChange:
    """What changed between versions."""

    next_round: int
    given: int  # tasks, since the federation began
    assigned: Mapping[int, Assignment] = field(default_factory=dict)  # by client: new, or changed
    ended: Sequence[int] = ()  # clients whose assignments ended, and nothing of theirs counted


class Roster:
    """All devices of a federation. Asks are held while a device is away: it may be heard again, and not ask twice."""

    def __init__(self) -> None:
        self.next_round = 0
        self.given = 0  # tasks, since the federation began
        self.assigned: dict[int, Assignment] = {}
        self.training: set[int] = set()
        self.away: set[int] = set()  # that left, and were not heard since
        self.known: set[int] = set()  # that were ever heard
        self.counted: dict[int, tuple[int, int]] = {}  # round and version of what counted last, until its device knows
        self.unheard_until = inf
        self.unheard: set[int] = set()  # since a restart, of those that were known before
        self._reported: set[int] = set()
        self._asks: dict[int, dict[int, Pull]] = {}  # by device and token
        self.ready: list[int] = []  # devices that can be chosen now, ascending
        self._early: set[int] = set()  # devices that wait for a later round
        self._first_round = 0  # that devices who wait would take part in

    @property
    def waiting(self) -> Mapping[int, Mapping[int, Pull]]:
        """Asks for a task, by device and token."""
        return self._asks

    # Devices come and go.

    def begin(self, moment: float, return_seconds: float) -> None:
        """The server starts, perhaps again. return_seconds: until devices that it knew, and are silent, are gone."""
        self.assigned = {client: replace(each, moment=moment) for client, each in self.assigned.items()}
        self.training, self.unheard = set(self.assigned), self.known.union(self.assigned)
        self.unheard_until = moment + return_seconds if self.unheard else inf

    def count_missing(self) -> None:
        """Devices that were not heard of again after a restart are gone."""
        gone, self.unheard, self.unheard_until = self.unheard, set(), inf
        for client in gone:
            self.leave(client)

    def leave(self, client: int) -> None:
        """A device cannot be heard any more: it is not waited for, and cannot be chosen."""
        self.away.add(client)
        self.training.discard(client)
        self._review(client)

    def hear(self, client: int) -> None:
        """A device is there, perhaps again."""
        self.known.add(client)
        self.unheard.discard(client)
        if client in self.away:
            self.away.remove(client)
            if client in self.assigned and client not in self._reported:
                self.training.add(client)
            self._review(client)

    # Asks for a task.

    def ask(self, client: int, token: int, pull: Pull) -> None:
        """Hold an ask for a task. Its device knows what became of its part in rounds before `pull.at_least`."""
        held = self._asks.setdefault(client, {})
        held[token] = pull
        if len(held) > MOST_ASKS:
            del held[next(iter(held))]
        first = self.first_round(client)
        self._first_round = max(self._first_round, first)
        if client in self.counted and self.counted[client][0] < first:
            del self.counted[client]
        self._review(client)

    def first_round(self, client: int) -> int:
        """That a device which waits would take part in."""
        return max(pull.at_least for pull in self._asks[client].values())

    def take_asks(self, client: int) -> Mapping[int, Pull]:
        """Its asks, by token, which are answered now."""
        asks = self._asks.pop(client, {})
        self._review(client)
        return asks

    # Tasks.

    def give(self, client: int, version: int, moment: float) -> None:
        """Assign the next task to a device that is ready."""
        self.assigned[client] = Assignment(self.next_round, version, version, moment)
        self.training.add(client)
        self.given += 1
        self._review(client)

    def report(self, client: int) -> None:
        """A device has done its task."""
        self.training.discard(client)
        self._reported.add(client)

    def end(self, clients: Iterable[int]) -> None:
        """Assignments end."""
        for client in clients:
            del self.assigned[client]
            self.training.discard(client)
            self._reported.discard(client)
            self._review(client)

    def advance(self) -> None:
        """The next round begins."""
        self.next_round += 1
        early, self._early = self._early, set()
        for client in early:
            self._review(client)

    def catch_up(self) -> None:
        """Go on to the round that a device waits for, which was refused in this one."""
        if self._first_round > self.next_round:
            self.advance()

    def change(self, change: RosterChange) -> None:
        """Make a change of before a restart again."""
        self.next_round, self.given = change.next_round, change.given
        self.assigned.update(change.assigned)
        self.known.update(change.assigned)
        for client in change.ended:
            self.assigned.pop(client, None)

    def forget_tasks(self) -> None:
        """Assignments of before a restart are of another past."""
        self.assigned.clear()

    def state_dict(self) -> dict[str, Any]:
        assigned = [(client, each.round, each.first, each.version) for client, each in self.assigned.items()]
        counted = [(client, *fate) for client, fate in self.counted.items()]
        return {
            "counters": [self.next_round, self.given],
            "assigned": torch.tensor(assigned, dtype=torch.int64).reshape(-1, 4),
            "counted": torch.tensor(counted, dtype=torch.int64).reshape(-1, 3),
            "known": torch.tensor(sorted(self.known), dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_round, self.given = state["counters"]
        self.assigned = {client: Assignment(*numbers) for client, *numbers in state["assigned"].tolist()}
        self.counted = {client: (index, version) for client, index, version in state["counted"].tolist()}
        self.known = set(state["known"].tolist()) if "known" in state else {*self.assigned, *self.counted}

    def _review(self, client: int) -> None:
        """Whether a device can be chosen may have changed."""
        waits = client in self._asks and client not in self.assigned
        if waits and self.first_round(client) > self.next_round:
            self._early.add(client)
            waits = False
        place = bisect_left(self.ready, client)
        is_listed = place < len(self.ready) and self.ready[place] == client
        wanted = waits and client not in self.away
        if wanted and not is_listed:
            insort(self.ready, client)
        elif is_listed and not wanted:
            del self.ready[place]

"""Roster: the devices that are present, that wait for a task, that have one, and that have reported.

A device is *ready* while it waits, is present and has no assignment. It is *training* from its assignment until its
report, while it is present. The cost of an event does not grow with the number of unrelated devices, except for a shift
in a sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from gossamer.base.peer_ops import Pull

MOST_ASKS = 16  # held requests per device; the oldest belong to broken connections


@dataclass(frozen=True)
class Assignment:
    """A task that a device was given."""

    round: int
    first: int  # the version when it was first given
    version: int  # the version when it was last given: a restarted device asks again
    moment: float = 0.0  # when it was given


@dataclass(frozen=True)
class RosterChange:
    """A change of assignments between versions, for the journal."""

    next_round: int
    given: int  # tasks, since the federation began
    assigned: Mapping[int, Assignment] = field(default_factory=dict)  # by client: new, or changed
    ended: Sequence[int] = ()  # clients with assignments that ended without a contribution


class Roster:
    """All devices of a federation. Requests of an absent device are held, since it may return without asking again."""

    def __init__(self) -> None:
        self.next_round = 0
        self.given = 0  # tasks, since the federation began
        self.assigned: dict[int, Assignment] = {}
        self.training: set[int] = set()
        self.away: set[int] = set()  # that left and have not returned
        self.known: set[int] = set()  # that have sent any message
        self.counted: dict[int, tuple[int, int]] = {}  # round and version of the last counted, until the device knows
        self.unheard_until = inf
        self.unheard: set[int] = set()  # devices known before a restart and silent since
        self._reported: set[int] = set()
        self._asks: dict[int, dict[int, Pull]] = {}  # by device and token
        self.ready: list[int] = []  # devices that can be chosen now, ascending
        self._early: set[int] = set()  # devices that wait for a later round
        self._first_round = 0  # largest first_round of the waiting devices

    @property
    def waiting(self) -> Mapping[int, Mapping[int, Pull]]:
        """Asks for a task, by device and token."""
        return self._asks

    # Presence.

    def begin(self, moment: float, return_seconds: float) -> None:
        """Start or restart the server. return_seconds: until known devices without a message count as gone."""
        self.assigned = {client: replace(each, moment=moment) for client, each in self.assigned.items()}
        self.training, self.unheard = set(self.assigned), self.known.union(self.assigned)
        self.unheard_until = moment + return_seconds if self.unheard else inf

    def count_missing(self) -> None:
        """Mark devices without a message since the restart as gone."""
        gone, self.unheard, self.unheard_until = self.unheard, set(), inf
        for client in gone:
            self.leave(client)

    def leave(self, client: int) -> None:
        """Mark a device as unreachable: it is not waited for and cannot be chosen."""
        self.away.add(client)
        self.training.discard(client)
        self._review(client)

    def mark_present(self, client: int) -> None:
        """Mark a device as present."""
        self.known.add(client)
        self.unheard.discard(client)
        if client in self.away:
            self.away.remove(client)
            if client in self.assigned and client not in self._reported:
                self.training.add(client)
            self._review(client)

    # Asks for a task.

    def ask(self, client: int, token: int, pull: Pull) -> None:
        """Hold a request for a task. Its device knows the outcome of all its rounds before `pull.at_least`."""
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
        """The first round that a waiting device can join."""
        return max(pull.at_least for pull in self._asks[client].values())

    def take_asks(self, client: int) -> Mapping[int, Pull]:
        """Remove and return the device's requests, by token."""
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
        """A device has reported."""
        self.training.discard(client)
        self._reported.add(client)

    def end(self, clients: Iterable[int]) -> None:
        """End assignments."""
        for client in clients:
            del self.assigned[client]
            self.training.discard(client)
            self._reported.discard(client)
            self._review(client)

    def advance(self) -> None:
        """Begin the next round."""
        self.next_round += 1
        early, self._early = self._early, set()
        for client in early:
            self._review(client)

    def catch_up(self) -> None:
        """Advance to the round that a device waits for after it was refused in this one."""
        if self._first_round > self.next_round:
            self.advance()

    def change(self, change: RosterChange) -> None:
        """Replay a change from the journal."""
        self.next_round, self.given = change.next_round, change.given
        self.assigned.update(change.assigned)
        self.known.update(change.assigned)
        for client in change.ended:
            self.assigned.pop(client, None)

    def forget_tasks(self) -> None:
        """Drop assignments of another lineage."""
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
        """Update `ready` after a change of one device."""
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

"""Synchronous rounds: a cohort trains from one version, and the next is made of what it reports until a deadline."""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from gossamer.errors import require
from gossamer.federated.server.rounds import Assignment, Rounds


class SynchronousRounds(Rounds):
    """A cohort at a time. A round ends with the report of `cohort` devices, of all that are still there, or, with at
    least `fewest`, at its deadline; one with too few by then is given up, and another cohort is chosen."""

    def __init__(
        self,
        *args: Any,
        round_seconds: float = inf,
        over_selection: float = 0.0,
        fewest: int = 1,
        **options: Any,
    ) -> None:
        """round_seconds: until the deadline. over_selection: share of devices chosen beyond the cohort, whose slowest
        are not waited for."""
        super().__init__(*args, **options)
        self.cohort = self.model.strategy.cohort(self.clients)
        self._chosen = min(ceil(self.cohort * (1 + over_selection)), self.clients)
        self._round_seconds, self._fewest = round_seconds, fewest
        self._deadline = inf
        self._gone: set[int] = set()
        self._wanted = self.cohort  # reports that end the round
        self._drew_nobody = False
        require(1 <= fewest <= self.cohort, f"fewest is 1 to the cohort's {self.cohort}, not {fewest}")
        require(over_selection >= 0, f"over_selection is a share, 0 or more, not {over_selection}")

    @property
    def due(self) -> float:
        return self._deadline

    def assign(self, moment: float) -> list[int]:
        if self.assigned:
            return []
        available = self.available()
        if len(available) < self._chosen or (self.selection.draws_each and self.returning):
            return []
        chosen = self.selection.choose(available, self._chosen, self.next_round)
        self._wanted = len(chosen) - (self._chosen - self.cohort)  # a policy may draw more than it was asked for
        self._drew_nobody = not chosen
        for client in chosen:
            self.give(client, moment)
        self._deadline = moment + self._round_seconds
        self._gone.clear()
        return chosen

    def is_complete(self, moment: float) -> bool:
        expected = [client for client in self.assigned if client not in self.reported and client not in self._gone]
        enough = len(self.reported) >= self._wanted or (not expected and len(self.reported) >= self._fewest)
        return enough or (moment >= self._deadline and len(self.reported) >= self._fewest)

    def is_hopeless(self, moment: float) -> bool:
        expected = [client for client in self.assigned if client not in self.reported and client not in self._gone]
        return bool(self.assigned) and (moment >= self._deadline or not expected)

    @property
    def drew_nobody(self) -> bool:
        return self._drew_nobody

    def staleness_allowed(self, assignment: Assignment) -> bool:
        return assignment.round == self.next_round

    def open_anew(self, moment: float) -> None:
        self.assigned.clear()  # who has not reported is too late
        self.next_round += 1
        self._deadline = inf
        self._drew_nobody = False

    def left(self, client: int) -> None:
        self._gone.add(client)

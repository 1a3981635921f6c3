"""Synchronous rounds: a cohort trains from one version, and the next is made of what it reports until a deadline."""

from __future__ import annotations

from math import ceil, inf, sqrt
from typing import Any, Literal

from gossamer.algorithms.strategies.federated import LocalWork
from gossamer.errors import RecipeError, require
from gossamer.federated.server.roster import Assignment
from gossamer.federated.server.rounds import Rounds

Late = Literal["drop", "count"]


class SynchronousRounds(Rounds):
    """A cohort at a time. A round ends with the report of `cohort` devices, of all that are still there, or, with at
    least `fewest`, at its deadline; one with too few by then is given up, and another cohort is chosen."""

    def __init__(
        self,
        *args: Any,
        round_seconds: float = inf,
        over_selection: float = 0.0,
        fewest: int = 1,
        late: Late = "drop",
        late_versions: int = 10,
        gather_seconds: float = inf,
        **options: Any,
    ) -> None:
        """round_seconds: until the deadline. over_selection: share of devices chosen beyond the cohort, whose slowest
        are not waited for. late: what becomes of reports after their round; "count": they are a part of the next
        version, by a weight divided by sqrt(1 + s) where s, at most `late_versions`, were made meanwhile.

        A round begins once as many devices wait as are chosen, or as there are, where some have left; after
        `gather_seconds` with those that wait, at least `fewest`."""
        super().__init__(*args, **options)
        require(1 <= fewest <= self.cohort, f"fewest is 1 to the cohort's {self.cohort}, not {fewest}")
        require(over_selection >= 0, f"over_selection is a share, 0 or more, not {over_selection}")
        require(late in ("drop", "count"), f'late is "drop" or "count", not {late!r}')
        require(late_versions >= 1, f"late_versions is 1 or more, not {late_versions}")
        self._draws_each = self.selection.draws_each
        self._check_privacy(over_selection, fewest, late)
        self._check_late(late)
        self._over_selection = over_selection
        self._most = min(ceil(self.cohort * (1 + over_selection) - 1e-9), self.clients)
        self._round_seconds, self._gather_seconds, self._fewest = round_seconds, gather_seconds, fewest
        self.attempts.fewest = fewest
        self._late_versions = late_versions if late == "count" else 0
        self._open: set[int] = set()  # devices that were chosen for this round
        self._enough = self.cohort  # reports that end it
        self._is_open = self._is_impatient = False

    def begin(self, moment: float) -> None:
        super().begin(moment)
        self._open = {client for client, each in self.roster.assigned.items() if each.round == self.roster.next_round}
        self._is_open = bool(self._open)
        self._enough = len(self._open) if self._draws_each else self.cohort
        self.deadline = moment + (self._round_seconds if self._is_open else self._gather_seconds)

    def _check_privacy(self, over_selection: float, fewest: int, late: Late) -> None:
        """A device that was drawn by a coin counts in the version of that draw or in none, whoever else was drawn."""
        if self.accountant is None:
            return
        term = self.accountant.privacy
        if late == "count":
            raise RecipeError(
                'late="count" makes a device a part of a version that it was not drawn for, and '
                f'{term!r} accounts for those that were. Write late="drop".'
            )
        if self._draws_each and (over_selection or fewest > 1):
            raise RecipeError(
                f"With over_selection or fewest, whether a device counts depends on the others, and "
                f"{term!r} accounts for devices that are drawn one by one. Leave both out, or write "
                f'sampling="fixed".'
            )

    def _check_late(self, late: Late) -> None:
        """A late report weighs less, also what it says that its device remembers from now on."""
        strategy = self.model.strategy
        if late == "count" and strategy.memory_keys:
            raise RecipeError(
                f'late="count" takes a part of what a late device sent, and with {strategy!r} the server keeps the '
                'sum of what all devices remember, which would no longer be one. Write late="drop".'
            )

    @property
    def wanted(self) -> int:
        if self._is_impatient:
            return self._fewest
        gone = len(self.roster.away) + len(self.roster.training) + len(self.reported)  # they cannot be chosen
        most = self.clients if self._draws_each else self._most
        return max(self._fewest, min(most, self.clients - gone))

    def assign(self, moment: float) -> list[int]:
        if self._is_open:
            return []
        if moment >= self.deadline:
            self._is_impatient, self.deadline = True, inf
        ready = self.roster.ready
        if len(ready) < self.wanted:
            return []
        chosen = self.selection.choose(ready, min(self._most, len(ready)), self.roster.next_round)
        for client in chosen:
            self.roster.give(client, self.model.version, moment)
        self._open, self._is_open, self._is_impatient = set(chosen), True, False
        self.drew_nobody = not chosen
        self._enough = len(chosen) if self._draws_each else self.cohort
        self.deadline = moment + self._round_seconds
        return chosen

    def is_complete(self, moment: float) -> bool:
        if not self._is_open:
            return self.all_reported()  # late: no other round can begin before they are counted
        on_time = len(self._open & self.reported.keys())
        nobody_left = moment >= self.deadline or self._open.isdisjoint(self.roster.training)
        return on_time >= self._enough or (nobody_left and len(self.reported) >= self._fewest)

    def is_between_rounds(self) -> bool:
        return not self._is_open

    def is_hopeless(self, moment: float) -> bool:
        return self._is_open and (moment >= self.deadline or self._open.isdisjoint(self.roster.training))

    def staleness_allowed(self, assignment: Assignment, staleness: int) -> bool:
        return assignment.round == self.roster.next_round or staleness <= self._late_versions

    def weight(self, work: LocalWork, staleness: int) -> float:
        return self.model.strategy.weight(work, staleness) / sqrt(1 + staleness)

    def open_anew(self, moment: float) -> None:
        version = self.model.version
        late = [client for client in self.roster.assigned if client in self._open]
        for client in late:
            self.selection.missed(client, moment - self.roster.assigned[client].moment)
        over = [client for client, each in self.roster.assigned.items() if version - each.version > self._late_versions]
        self._end(over if self._late_versions else [*self.roster.assigned])
        self._open, self._is_open, self.drew_nobody = set(), False, False
        self.deadline = moment + self._gather_seconds

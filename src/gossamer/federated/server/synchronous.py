"""Synchronous rounds: a cohort trains from one version, and the reports before a deadline make the next version."""

from __future__ import annotations

from math import ceil, inf, sqrt
from typing import Any, Literal

from gossamer.algorithms.strategies.federated_rules import LocalWork
from gossamer.errors import RecipeError, require
from gossamer.federated.server.roster import Assignment
from gossamer.federated.server.rounds import Rounds

Late = Literal["drop", "count"]


class SynchronousRounds(Rounds):
    """One cohort at a time.

    A round ends after `cohort` reports, when all devices that are still present have reported, or at its deadline with
    at least `fewest` reports. A round with fewer is given up, and another cohort is chosen.

    A round begins when as many devices wait as will be chosen (or as are left, if some have left). After
    `gather_seconds` it begins with the waiting devices, at least `fewest`.

    Args:
        round_seconds: seconds until the deadline of a round.
        over_selection: fraction of additional devices beyond the cohort. The slowest of them are not waited for.
        fewest: smallest number of reports per version.
        late: "drop" discards reports after the end of their round. "count" adds them to the next version, with their
            weight divided by sqrt(1 + s), where s is the staleness in versions.
        late_versions: largest staleness s that counts.
        gather_seconds: seconds until a round begins with fewer devices.

    Raises:
        ValueError: an argument is out of range.
        RecipeError: the arguments do not fit the recipe's privacy or strategy.
    """

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
        super().__init__(*args, **options)
        require(1 <= fewest <= self.cohort, f"fewest must be 1 to the cohort's {self.cohort}, got {fewest}")
        require(over_selection >= 0, f"over_selection must be a fraction, 0 or more, got {over_selection}")
        require(late in ("drop", "count"), f'late must be "drop" or "count", got {late!r}')
        require(late_versions >= 1, f"late_versions must be 1 or more, got {late_versions}")
        self._draws_each = self.selection.draws_each
        self._check_privacy(over_selection, fewest, late)
        self._check_late(late)
        self._over_selection = over_selection
        self._most = min(ceil(self.cohort * (1 + over_selection) - 1e-9), self.clients)
        self._round_seconds, self._gather_seconds, self._fewest = round_seconds, gather_seconds, fewest
        self.attempts.fewest = fewest
        self._late_versions = late_versions if late == "count" else 0
        self._open: set[int] = set()  # devices chosen for this round
        self._enough = self.cohort  # reports that end the round
        self._is_open = self._is_impatient = False

    def begin(self, moment: float) -> None:
        super().begin(moment)
        self._open = {client for client, each in self.roster.assigned.items() if each.round == self.roster.next_round}
        self._is_open = bool(self._open)
        self._enough = len(self._open) if self._draws_each else self.cohort
        self.deadline = moment + (self._round_seconds if self._is_open else self._gather_seconds)

    def _check_privacy(self, over_selection: float, fewest: int, late: Late) -> None:
        """A device that was drawn independently counts in that version or in none, regardless of other draws."""
        if self.accountant is None:
            return
        term = self.accountant.privacy
        if late == "count":
            raise RecipeError(
                'late="count" adds a device to a version that it was not drawn for, but '
                f'{term!r} accounts only for drawn devices. Write late="drop".'
            )
        if self._draws_each and (over_selection or fewest > 1):
            raise RecipeError(
                f"With over_selection or fewest, whether a device counts depends on the others, but "
                f"{term!r} accounts for independent draws. Leave both out, or write "
                f'sampling="fixed".'
            )

    def _check_late(self, late: Late) -> None:
        """Late reports have a smaller weight, which is incompatible with memory on devices."""
        strategy = self.model.strategy
        if late == "count" and strategy.memory_keys:
            raise RecipeError(
                f'late="count" scales down the contribution of a late device, but with {strategy!r} the server keeps '
                'the exact sum of the memories of all devices. Write late="drop".'
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
        self.drew_empty = not chosen
        self._enough = len(chosen) if self._draws_each else self.cohort
        self.deadline = moment + self._round_seconds
        return chosen

    def is_complete(self, moment: float) -> bool:
        if not self._is_open:
            return self.all_reported()  # late reports: no other round can begin before they are counted
        on_time = len(self._open & self.reported.keys())
        all_done = moment >= self.deadline or self._open.isdisjoint(self.roster.training)
        return on_time >= self._enough or (all_done and len(self.reported) >= self._fewest)

    def is_between_rounds(self) -> bool:
        return not self._is_open

    def is_hopeless(self, moment: float) -> bool:
        return self._is_open and (moment >= self.deadline or self._open.isdisjoint(self.roster.training))

    def staleness_allowed(self, assignment: Assignment, staleness: int) -> bool:
        return assignment.round == self.roster.next_round or staleness <= self._late_versions

    def weight(self, work: LocalWork, staleness: int) -> float:
        return self.model.strategy.weight(work, staleness) / sqrt(1 + staleness)

    def reopen(self, moment: float) -> None:
        version = self.model.version
        late = [client for client in self.roster.assigned if client in self._open]
        for client in late:
            self.selection.missed(client, moment - self.roster.assigned[client].moment)
        over = [client for client, each in self.roster.assigned.items() if version - each.version > self._late_versions]
        self._end(over if self._late_versions else [*self.roster.assigned])
        self._open, self._is_open, self.drew_empty = set(), False, False
        self.deadline = moment + self._gather_seconds

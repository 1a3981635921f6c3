"""Buffered rounds: devices train without waiting for each other, and a version is made of every few reports."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

from gossamer.errors import RecipeError, require
from gossamer.federated.server.roster import Assignment
from gossamer.federated.server.rounds import Gathered, Rounds


class BufferedRounds(Rounds):
    """FedBuff: asynchronous training with a buffer of reports.

    `cohort` devices train at any time, each from the version at the time when it was chosen. Every `buffer` reports
    make the next version, weighted by their staleness.

    Reports count regardless of their base version, up to a staleness of `staleness` versions.
    source: Nguyen et al. 2022, AISTATS (Federated learning with buffered asynchronous aggregation)

    Args:
        task_seconds: seconds after which the server does not wait for a device.
        gather_seconds: seconds until a version is made of at least `fewest` reports although the buffer is not full,
            counted from the time when all present devices have reported.
        fewest: smallest number of reports per version.

    Raises:
        RecipeError: the buffer is larger than the federation, and would never be full.
    """

    def __init__(
        self,
        *args: Any,
        task_seconds: float = inf,
        gather_seconds: float = inf,
        fewest: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.buffer = self.model.strategy.contributions_per_version(self.clients)
        self.oldest_staleness = self.model.strategy.oldest_staleness
        if self.buffer > self.clients:
            raise RecipeError(
                f"a buffer of {self.buffer} reports is never full, since each of {self.clients} clients can have only "
                f"one report in it. Write FedBuff(buffer={self.clients}) or less."
            )
        require(1 <= fewest <= self.buffer, f"fewest must be 1 to the buffer's {self.buffer}, got {fewest}")
        self._task_seconds, self._gather_seconds, self._fewest = task_seconds, gather_seconds, fewest
        self._gathers_until = inf  # finite if only an absent device could fill the buffer
        self._is_impatient = False
        self._due_tasks: deque[tuple[float, int, int]] = deque()  # moment, client and round, ascending

    def begin(self, moment: float) -> None:
        super().begin(moment)
        self._due_tasks = deque(
            (moment + self._task_seconds, c, each.round) for c, each in self.roster.assigned.items()
        )
        self._set_deadline(moment)

    def assign(self, moment: float) -> list[int]:
        while self._due_tasks and self._due_tasks[0][0] <= moment:
            _, client, index = self._due_tasks.popleft()
            if client in self.roster.training and self.roster.assigned[client].round == index:
                self.selection.missed(client, moment - self.roster.assigned[client].moment)
                self.left(client)
        ready = self.roster.ready
        count = min(self.cohort - len(self.roster.training), len(ready))
        chosen = self.selection.choose(ready, count, self.roster.given) if count > 0 else []
        for client in chosen:
            self.roster.give(client, self.model.version, moment)
            self._due_tasks.append((moment + self._task_seconds, client, self.roster.next_round))
        self._set_deadline(moment)
        return chosen

    def _set_deadline(self, moment: float) -> None:
        """Set the deadline: of the first task, or of waiting for absent devices."""
        self._is_impatient |= moment >= self._gathers_until
        gathers = bool(self.reported) and not self.roster.training and not self._is_impatient
        self._gathers_until = min(self._gathers_until, moment + self._gather_seconds) if gathers else inf
        self.deadline = min(self._due_tasks[0][0] if self._due_tasks else inf, self._gathers_until)

    def _wanted_reports(self, moment: float = -inf) -> int:
        is_late = self._is_impatient or moment >= self._gathers_until
        return self._fewest if is_late and not self.roster.training else self.buffer

    def is_complete(self, moment: float) -> bool:
        """Also true when all devices that have not left have reported, since no other report can arrive."""
        return len(self.reported) >= self._wanted_reports(moment) or self.all_reported()

    @property
    def gathered(self) -> Gathered | None:
        if not self.reported or self.roster.training:
            return super().gathered
        return Gathered(
            len(self.reported), self._wanted_reports(), "reports that a version is made of", "it is made of"
        )

    def is_between_rounds(self) -> bool:
        """A refused device waits for the next version, unless no other device could report."""
        return not self.roster.training

    def staleness_allowed(self, assignment: Assignment, staleness: int) -> bool:
        return self.oldest_staleness is None or staleness <= self.oldest_staleness

    def reopen(self, moment: float) -> None:
        """End tasks of absent devices that are too old to count."""
        self._gathers_until, self._is_impatient = inf, False
        if self.oldest_staleness is not None:
            oldest = self.model.version - self.oldest_staleness
            self._end([c for c, each in self.assigned.items() if c in self.roster.away and each.version < oldest])

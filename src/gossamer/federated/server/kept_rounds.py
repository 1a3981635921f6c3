"""Kept rounds: what of them outlives their server, and how another server goes on from it."""

from __future__ import annotations

from typing import Any

from gossamer.federated.server.contributions.admission import ContributionAdmission
from gossamer.federated.server.contributions.contribution_sum import ContributionSum
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.journal import refuse_others
from gossamer.federated.server.roster import Roster, RosterChange
from gossamer.federated.server.rounds_privacy import RoundsPrivacy
from gossamer.federated.server.selection import SelectionPolicy

KEPT = ("model", "roster", "selection", "admission", "privacy")  # by a journal


class KeptRounds:
    """The part of rounds that a journal keeps."""

    clients: int
    model: GlobalModel
    roster: Roster
    selection: SelectionPolicy
    admission: ContributionAdmission
    privacy: RoundsPrivacy
    sum: ContributionSum

    @property
    def next_round(self) -> int:
        return self.roster.next_round

    @property
    def must_be_journaled(self) -> bool:
        """Whether a server that forgets rounds does harm: it would spend the same privacy again."""
        return self.privacy.guard is not None

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self._identity()} | {name: getattr(self, name).state_dict() for name in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for the state of another federation."""
        refuse_others(state["identity"], self._identity())
        for name in KEPT:
            getattr(self, name).load_state_dict(state[name])
        self.sum = self.privacy.new_sum()

    def change(self, change: RosterChange) -> None:
        """Make a change again."""
        self.roster.change(change)
        self.privacy.given(change.assigned)

    def begin_anew(self) -> None:
        """Go on from this version as another past: those after it are lost, and devices may hold them."""
        self.model.begin_anew()
        self.roster.forget_tasks()

    def _identity(self) -> dict[str, Any]:
        return {"clients": self.clients} | self.model.identity()

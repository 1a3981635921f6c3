"""Privacy of rounds: what a strategy's privacy makes of selection, limits and sums; nothing where it has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gossamer.errors import RecipeError
from gossamer.federated.privacy.privacy_guard import guard_for, private_selection
from gossamer.federated.server.contributions.admission import ContributionLimits
from gossamer.federated.server.contributions.contribution_sum import ContributionSum, sum_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.selection import SelectionPolicy


class RoundsPrivacy:
    """Between the rounds of a federation and the guard of its privacy, if it has one."""

    def __init__(
        self, model: GlobalModel, clients: int, selection: SelectionPolicy, limits: ContributionLimits | None
    ) -> None:
        """Raises RecipeError for a selection that goes by what devices tell, AttachError for a model that noise would
        break, ValueError for a budget that no round keeps."""
        self._strategy = model.strategy
        self.guard = guard_for(model.strategy, model.compressor, model.state, clients)
        self.selection, self.limits = selection, limits or ContributionLimits()
        if self.guard is None and selection.draws_each:
            raise RecipeError(
                f"{type(selection).__name__} draws each device by a coin, perhaps none, of which no mean can be made. "
                "Leave the selection out, or write privacy=CentralPrivacy(...), which divides by how many are expected."
            )
        if self.guard is not None:
            self.selection = private_selection(self.guard, selection)
        if self.guard is not None and not self.guard.privacy.on_device:
            # What one device sent must not decide whether another's counts; with its own noise it may.
            self.limits = replace(self.limits, largest_ratio=None)

    def new_sum(self) -> ContributionSum:
        return sum_for(self._strategy, self.guard)

    def given(self, clients: Iterable[int]) -> None:
        """Devices were given tasks."""
        if self.guard is not None:
            self.guard.given(clients)

    def committed(self, clients: Iterable[int], summed: ContributionSum) -> float | None:
        """A version was made of these. Returns the epsilon of all so far; None without privacy."""
        if self.guard is None:
            return None
        self.guard.committed(clients, summed.share_below())
        return self.guard.epsilon

    @property
    def exhausted(self) -> bool:
        return self.guard is not None and self.guard.exhausted

    @property
    def why(self) -> str:
        """Why no round begins any more, where it is for privacy."""
        return self.guard.why if self.guard is not None and self.guard.exhausted else ""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.guard is not None:
            self.guard.load_state_dict(state)

"""Candidates: recipes of the whole grammar, and why some of them are left out."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from gossamer.events import Attached
from gossamer.network import Network
from gossamer.profiling.gradient_statistics import GradientStatistics


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe that could be tried."""

    recipe: str  # as one would write it
    excluded: str | None = None  # why it is left out, before anything is priced


def candidates(
    model: Attached,
    optimizer_type: type[Optimizer],
    statistics: GradientStatistics | None,
    workers: int,
    network: Network,
) -> list[Candidate]:
    """Every recipe worth a price, Dense() first, and those that are left out with the reason.

    model: as the script attaches it with any recipe, for the shapes of its parameters. optimizer_type: the script's.
    statistics: None where none were taken; nothing is then left out for them. network: whose sites recipes may use.
    """
    raise NotImplementedError

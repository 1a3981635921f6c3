"""Thresholds: at which rates and delays of a network another recipe would be the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.advise.foretell import Foretold
from gossamer.advise.step_pricing import StepPricer
from gossamer.network import Network


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A range of one property of the network, and the recipe that is expected to be first there."""

    of: str  # "rate" or "round trip"
    recipe: str
    above: float  # bits per second or seconds of the slowest line or longest path; 0 where there is no lower end
    below: float | None  # likewise; None where there is no upper end


def thresholds(
    finalists: Sequence[Foretold],
    pricer: StepPricer,
    network: Network,
    *,
    expected_steps: Sequence[float] | None = None,
) -> list[Threshold]:
    """Ranges of the rate (x 0.01 to x 100 of all lines) and of the round trip, in ascending order, and who is first.

    expected_steps: of each finalist, as a race has found them; None: the finalists' own priors.
    """
    raise NotImplementedError

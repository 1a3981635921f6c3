"""Losses of several seeds: mean, spread, and by how many spreads one is better than another."""

import statistics
from dataclasses import dataclass
from math import inf, isfinite, nan


@dataclass(frozen=True)
class Losses:
    """By seed; inf where the training diverged."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 and isfinite(self.mean) else nan

    def __str__(self) -> str:
        if not isfinite(self.mean):
            return f"diverged ({sum(value == inf for value in self.values)} of {len(self.values)})"
        return f"{self.mean:.3f}" + (f" ± {self.spread:.3f}" if isfinite(self.spread) else "")

    def lead(self, other: "Losses") -> float:
        """By how many spreads this is better, the larger of both; nan where one seed has none."""
        if not isfinite(self.mean):
            return -inf
        known = len(self.values) > 1 and len(other.values) > 1
        return (other.mean - self.mean) / max(self.spread, other.spread) if known else nan


def number(loss: float | None) -> float:
    return inf if loss is None else loss

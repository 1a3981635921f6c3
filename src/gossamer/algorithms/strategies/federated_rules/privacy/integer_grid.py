"""Integer grid: the rounding of a clipped contribution, so that it and its noise fit into a sum of integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from gossamer.errors import require

WIDEST = 2048.0  # largest standard deviation of a device's noise, in grid units; larger only makes tables longer
TAIL, SPARE = 12, 32  # standard deviations and units that noise stays within, except for one in 1e20 draws


@dataclass(frozen=True, kw_only=True)
class IntegerGrid:
    """A contribution of norm `clip` becomes integers of `bits`, to which a device adds noise of `local_variance`.

    The noise of any `survivors` devices together is `noise` times the norm of the largest change by one device,
    including rounding: x is rounded at random to one of its neighbors, repeatedly until the norm of the result is at
    most sqrt(C^2 + d / 4 + C + sqrt(d) / 2), for C units and d entries.
    source: Kairouz et al. 2021, ICML, Theorem 1 (with beta = exp(-1/2))
    """

    clip: float
    noise: float
    entries: int  # d: of all tensors of a contribution
    bits: int  # of each summand
    survivors: int  # least number of devices in a sum

    def __post_init__(self) -> None:
        require(self.entries >= 1 and self.survivors >= 1, "a sum must have at least one entry and one device")
        require(
            self._fits(1.0),
            f"{self.bits} bits have no room for a clipped number and noise of {self.noise} times the clip norm over "
            f"{self.survivors} devices. Write SecureAggregation(bits={min(self.bits + 4, 32)}).",
        )

    @cached_property
    def units(self) -> float:
        """C: the clip norm in grid units, as many as fit."""
        low, high = 1.0, 2.0 ** (self.bits - 1)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    @property
    def unit(self) -> float:
        """The value of 1 grid unit."""
        return self.clip / self.units

    @property
    def largest(self) -> int:
        """The largest integer of either sign."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def norm(self) -> float:
        """The largest Euclidean norm of a device's integers, before noise."""
        return self._rounded(self.units)

    @property
    def norm1(self) -> float:
        """The largest sum of absolute values, using that integers are at most their squares."""
        return self.norm * min(sqrt(self.entries), self.norm)

    @property
    def variance(self) -> float:
        """The variance of the noise of `survivors` devices together."""
        return (self.noise * self.norm) ** 2

    @property
    def local_variance(self) -> float:
        """The variance of one device's noise."""
        return self.variance / self.survivors

    def _rounded(self, units: float) -> float:
        return min(units + sqrt(self.entries), sqrt(units**2 + self.entries / 4 + units + sqrt(self.entries) / 2))

    def _fits(self, units: float) -> bool:
        deviation = self.noise * self._rounded(units) / sqrt(self.survivors)
        return deviation <= WIDEST and units + 1 + TAIL * deviation + SPARE <= self.largest

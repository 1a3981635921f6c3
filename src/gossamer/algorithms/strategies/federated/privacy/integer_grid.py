"""Integer grid: how finely a clipped contribution is rounded, so that it and its noise fit into a sum of integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from gossamer.errors import require

WIDEST = 2048.0  # standard deviation of a device's noise, in units of the grid: wider changes nothing but tables
TAIL, SPARE = 12, 32  # noise stays within so many standard deviations and units, but for once in 1e20 draws


@dataclass(frozen=True, kw_only=True)
class IntegerGrid:
    """A contribution of norm `clip` becomes integers of `bits`, to which a device adds noise of `local_variance`.

    The noise of any `survivors` devices together has `noise` times the norm of what a device can change, rounding
    included: x is rounded at random to one of its neighbors, again and again until the result's norm is at most
    sqrt(C^2 + d / 4 + C + sqrt(d) / 2), for C units and d entries.
    source: Kairouz et al. 2021, ICML, Theorem 1 (with beta = exp(-1/2))
    """

    clip: float
    noise: float
    entries: int  # d: of all of a contribution's tensors
    bits: int  # of an integer that a device gives to the sum
    survivors: int  # devices that the sum has at least

    def __post_init__(self) -> None:
        require(self.entries >= 1 and self.survivors >= 1, "a sum has at least one entry, of one device")
        require(
            self._fits(1.0),
            f"{self.bits} bits hold no clipped number beside noise of {self.noise} times the clip norm over "
            f"{self.survivors} devices: write SecureAggregation(bits={min(self.bits + 4, 32)})",
        )

    @cached_property
    def units(self) -> float:
        """C: the clip norm in units of the grid, as many as fit."""
        low, high = 1.0, 2.0 ** (self.bits - 1)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    @property
    def unit(self) -> float:
        """What 1 of an integer stands for."""
        return self.clip / self.units

    @property
    def largest(self) -> int:
        """The largest integer, either sign."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def norm(self) -> float:
        """The most that a device's integers have, before noise (Euclidean)."""
        return self._rounded(self.units)

    @property
    def norm1(self) -> float:
        """Likewise, of the sum of absolute values: integers are no larger than their squares."""
        return self.norm * min(sqrt(self.entries), self.norm)

    @property
    def variance(self) -> float:
        """Of the noise of `survivors` devices together."""
        return (self.noise * self.norm) ** 2

    @property
    def local_variance(self) -> float:
        """Of one device's noise."""
        return self.variance / self.survivors

    def _rounded(self, units: float) -> float:
        return min(units + sqrt(self.entries), sqrt(units**2 + self.entries / 4 + units + sqrt(self.entries) / 2))

    def _fits(self, units: float) -> bool:
        deviation = self.noise * self._rounded(units) / sqrt(self.survivors)
        return deviation <= WIDEST and units + 1 + TAIL * deviation + SPARE <= self.largest

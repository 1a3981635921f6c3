"""Loss curve: a metric over steps and virtual seconds, as one contender of a race logged it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LARGEST = 1e100  # of a loss: sums of squares of such values are finite
Point = tuple[int, float, float]  # step, virtual seconds, value


@dataclass(frozen=True)
class LossCurve:
    """steps, seconds, values: (points,), by ascending step; one point a step, the mean of what was logged there."""

    steps: Floats
    seconds: Floats
    values: Floats

    @classmethod
    def of(cls, points: Iterable[Point]) -> LossCurve:
        """A curve of (step, virtual seconds, value); values that are not finite, or beyond LARGEST, are left out."""
        table = np.array([*points], dtype=np.float64).reshape(-1, 3)
        table = table[np.abs(table[:, 2]) <= LARGEST]
        steps, places, counts = np.unique(table[:, 0], return_inverse=True, return_counts=True)
        seconds, values = (np.bincount(places, column, len(steps)) / counts for column in table[:, 1:].T)
        return cls(steps, seconds, values)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> list[Point]:
        return [(int(step), float(at), float(value)) for step, at, value in zip(*self._columns, strict=True)]

    @property
    def every_step(self) -> bool:
        """Whether it is logged in most steps: then its values are of single batches, and are smoothed."""
        return len(self) > 2 and len(self) > 0.5 * (self.steps[-1] - self.steps[0] + 1)

    def until(self, seconds: float) -> LossCurve:
        """What was logged up to a virtual second."""
        return self._kept(self.seconds <= seconds * (1 + 1e-9))

    def between_seconds(self, after: float, until: float) -> LossCurve:
        return self._kept((self.seconds > after) & (self.seconds <= until * (1 + 1e-9)))

    def between_steps(self, after: float, until: float) -> LossCurve:
        return self._kept((self.steps > after) & (self.steps <= until))

    def seconds_at(self, step: float) -> float:
        """The virtual second of a step, between two points along a straight line."""
        return float(np.interp(step, self.steps, self.seconds))

    def moving_average(self, points: int) -> LossCurve:
        """Means over so many consecutive points, each at the mean of their steps and seconds."""
        width = max(1, min(points, len(self)))
        if not len(self):
            return self
        kernel = np.full(width, 1 / width)
        return LossCurve(*(np.convolve(column, kernel, mode="valid") for column in self._columns))

    def thinned(self, points: int) -> LossCurve:
        """At most so many points: means of neighbors, for pictures and files."""
        if len(self) <= points:
            return self
        edges = np.linspace(0, len(self), points + 1).astype(int)
        pieces = [slice(first, last) for first, last in pairwise(edges)]
        return LossCurve(*(np.array([column[piece].mean() for piece in pieces]) for column in self._columns))

    @property
    def _columns(self) -> tuple[Floats, Floats, Floats]:
        return self.steps, self.seconds, self.values

    def _kept(self, which: npt.NDArray[np.bool_]) -> LossCurve:
        return LossCurve(*(column[which] for column in self._columns))

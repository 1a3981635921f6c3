"""Aggregators: combine a cohort's contributions, by their weighted mean or by a robust rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from gossamer.base.term import Term


class Aggregator(Term, ABC):
    """Base class of aggregators. Subclasses are frozen dataclasses of hyperparameters with a pure rule."""

    kind = "aggregator"

    @property
    def is_linear(self) -> bool:
        """Whether it is a weighted sum, so that contributions may be added as they arrive, and under masks."""
        return False

    @property
    def by_entry(self) -> bool:
        """Whether it compares the devices' values of each entry, so that an entry that is not sent counts as zero."""
        return False

    @abstractmethod
    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        """Combine contributions: (k, n), at least float32, with weights: (k,), positive. Returns (n,)."""


@dataclass(frozen=True, repr=False)
class WeightedMean(Aggregator):
    """The weighted mean of a cohort's contributions.

    sum(w_i x_i) / sum(w_i), over the devices of the cohort that reported
    law:    the normalized weights of the reporting devices add up to 1, for any cohort size
    source: McMahan et al. 2017, AISTATS

    Example:
        >>> gossamer.WeightedMean()
        WeightedMean()
    """

    @property
    def is_linear(self) -> bool:
        return True

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        return weights.to(contributions.dtype) @ contributions / weights.sum()

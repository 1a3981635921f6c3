"""Aggregator: makes one contribution of a cohort's, by their weighted mean or by a rule that outliers do not move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from gossamer.base.term import Term


class Aggregator(Term, ABC):
    """How a cohort's contributions become one. Subclasses are plain hyperparameters and a pure rule."""

    kind = "aggregator"

    @property
    def is_linear(self) -> bool:
        """Whether it is a weighted sum, so that contributions may be added as they arrive, and under masks."""
        return False

    @property
    def by_entry(self) -> bool:
        """Whether it compares what devices say of one entry, so that a device that says nothing of it counts as one
        that says zero."""
        return False

    @abstractmethod
    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        """One contribution of many. contributions: (k, n), at least float32; weights: (k,), positive. Returns (n,)."""


@dataclass(frozen=True, repr=False)
class WeightedMean(Aggregator):
    """The weighted mean of a cohort's contributions.

    sum(w_i x_i) / sum(w_i), over the devices of the cohort that answered
    law:    weights of the answering devices add up to 1, however many were chosen
    source: McMahan et al. 2017, AISTATS
    """

    @property
    def is_linear(self) -> bool:
        return True

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        return weights.to(contributions.dtype) @ contributions / weights.sum()

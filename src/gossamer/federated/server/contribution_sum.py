"""Contribution sums: contributions added as they come, or kept for an aggregator that must see all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.strategies.federated import Aggregator, CohortSummary, FederatedStrategy


class ContributionSum(ABC):
    """What came of a cohort so far."""

    def __init__(self) -> None:
        self.count = 0
        self._weight, self._steps, self._square_steps = 0.0, 0.0, 0.0

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        """blocks: (n,) each, which may be kept or overwritten. weight: above 0."""
        self._add(blocks, weight)
        self.count += 1
        self._weight += weight
        self._steps += weight * steps
        self._square_steps += weight * steps**2

    def add_total(self, sums: Sequence[Tensor], weight: float, steps: float, count: int) -> None:
        """Add what `count` contributions came to elsewhere. sums: (n,) each, of contributions times weights; weight:
        theirs together; steps: the sum of theirs times weights. Raises TypeError where single ones must be seen."""
        self._add_sums(sums)
        self.count += count
        self._weight += weight
        self._steps += steps

    def _add_sums(self, sums: Sequence[Tensor]) -> None:
        raise TypeError("an aggregator that compares contributions cannot take their sum")

    def summary(self, clients: int) -> CohortSummary:
        return CohortSummary(
            contributions=self.count,
            clients=clients,
            steps=self._steps / self._weight,
            square_steps=self._square_steps / self._weight,
            mean_weight=self._weight / self.count,
        )

    @abstractmethod
    def _add(self, blocks: Sequence[Tensor], weight: float) -> None: ...

    @abstractmethod
    def means(self) -> tuple[Tensor, ...]:
        """One contribution of all: (n,) each. There is at least one."""


class StreamedMean(ContributionSum):
    """A weighted sum in the order of arrival. Memory: one contribution, however many come."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: tuple[Tensor, ...] = ()

    def _add(self, blocks: Sequence[Tensor], weight: float) -> None:
        if not self._sums:
            self._sums = tuple(torch.zeros_like(block) for block in blocks)
        for into, block in zip(self._sums, blocks, strict=True):
            into.add_(block, alpha=weight)

    def _add_sums(self, sums: Sequence[Tensor]) -> None:
        self._add(sums, 1.0)

    def means(self) -> tuple[Tensor, ...]:
        return tuple(each / self._weight for each in self._sums)


class Kept(ContributionSum):
    """All contributions, for an aggregator that compares them. Memory: as many contributions as come."""

    def __init__(self, aggregator: Aggregator) -> None:
        super().__init__()
        self._aggregator = aggregator
        self._kept: list[tuple[Tensor, ...]] = []
        self._weights: list[float] = []

    def _add(self, blocks: Sequence[Tensor], weight: float) -> None:
        self._kept.append(tuple(blocks))
        self._weights.append(weight)

    def means(self) -> tuple[Tensor, ...]:
        weights = torch.tensor(self._weights, dtype=torch.float64)
        return tuple(self._aggregator.combine(torch.stack(blocks), weights) for blocks in zip(*self._kept, strict=True))


def sum_for(strategy: FederatedStrategy) -> ContributionSum:
    """How contributions of such a strategy are summed."""
    return StreamedMean() if strategy.aggregator.is_linear else Kept(strategy.aggregator)

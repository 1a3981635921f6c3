"""Aggregation: FedAvg's weighted mean as a running sum, or all contributions kept for a robust aggregator.

Sums under privacy, with noise, are in `privacy/clipping_and_noise`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import Aggregator, CohortSummary

Sizes = tuple[float, ...]  # norms, weight and steps of a contribution, for the comparison with others


class HeldContribution(NamedTuple):
    """A contribution that is compared with others before it is added."""

    blocks: tuple[Tensor, ...]
    weight: float
    steps: int
    sizes: Sizes


class ContributionSum(ABC):
    """The contributions of a round so far."""

    def __init__(self) -> None:
        self.count = 0
        self.held: dict[int, HeldContribution] = {}  # by client, in the order of arrival
        self._weight, self._steps, self._square_steps = 0.0, 0.0, 0.0

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        """Add one contribution. blocks: (n,) each, may be kept or overwritten. weight: above 0."""
        self._add(blocks, weight)
        self.count += 1
        self._weight += weight
        self._steps += weight * steps
        self._square_steps += weight * steps**2

    def add_total(self, sums: Sequence[Tensor], weight: float, steps: float, count: int) -> None:
        """Add a sum of contributions, such as the unmasked sum of secure aggregation.

        Args:
            sums: (n,) each, contributions times weights.
            weight: total weight.
            steps: sum of steps times weights.
            count: number of contributions.

        Raises:
            TypeError: the aggregator needs individual contributions.
        """
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

    def share_below(self) -> float | None:
        """Noisy fraction of contributions with a norm of at most the clip; None without clipping."""
        return None

    @abstractmethod
    def _add(self, blocks: Sequence[Tensor], weight: float) -> None: ...

    @abstractmethod
    def means(self) -> tuple[Tensor, ...]:
        """The aggregate of all contributions, of which there is at least one: (n,) each."""


class WeightedSum(ContributionSum):
    """FedAvg's mean, sum(w_k x_k) / sum(w_k), added in the order of arrival. Memory: one contribution."""

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


class KeptContributions(ContributionSum):
    """All contributions, for an aggregator that compares them. Memory: one per contribution."""

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


def sum_for(aggregator: Aggregator) -> ContributionSum:
    """The sum of contributions that an aggregator needs."""
    return WeightedSum() if aggregator.is_linear else KeptContributions(aggregator)

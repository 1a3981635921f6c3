"""Contribution sums: contributions added as they come, kept for an aggregator, or clipped and summed with noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated import Aggregator, CentralPrivacy, CohortSummary, FederatedStrategy
from gossamer.federated.privacy.clipping import clip_factor, common_norm
from gossamer.federated.privacy.gaussian_noise import gaussian
from gossamer.federated.privacy.privacy_guard import PrivacyGuard

Sizes = tuple[float, ...]  # of a contribution, by what is compared with others'


class HeldContribution(NamedTuple):
    """A contribution that is to be compared with others before it is added."""

    blocks: tuple[Tensor, ...]
    weight: float
    steps: int
    sizes: Sizes


class ContributionSum(ABC):
    """What came of a cohort so far."""

    def __init__(self) -> None:
        self.count = 0
        self.held: dict[int, HeldContribution] = {}  # by client, in the order of arrival
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

    def share_below(self) -> float | None:
        """The share of contributions whose norm was at most the clip, with noise; None where none is clipped."""
        return None

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


class EqualMean(StreamedMean):
    """The mean of contributions that carry their own noise: weights would tell how much data a device has."""

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        super().add(blocks, 1.0, 1)


class PrivateSum(ContributionSum):
    """Contributions clipped to one norm, weighted alike, summed with Gaussian noise, over the expected cohort.

    What it gives is the same however often it is asked: noise that is drawn twice for one sum averages out.
    """

    def __init__(self, guard: PrivacyGuard, privacy: CentralPrivacy) -> None:
        super().__init__()
        assert guard.clip is not None
        self._clip, self._cohort, self._bits = guard.clip, guard.cohort, guard.bits
        self._deviation = privacy.sum_noise_of(guard.cohort) * guard.clip
        self._count_deviation = privacy.count_noise_of(guard.cohort)
        self._halves = 0.0
        self._blank = guard.blank
        self._sums = tuple(torch.zeros(each.shape, dtype=torch.float64) for each in guard.blank)
        self._means: tuple[Tensor, ...] = ()
        self._share: float | None = None

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        """Every device weighs 1, whatever it says of its data. blocks: (n,) each, finite. Raises NotFinite."""
        super().add(blocks, 1.0, 1)

    def _add(self, blocks: Sequence[Tensor], weight: float) -> None:
        norm = common_norm(blocks)
        for into, block in zip(self._sums, blocks, strict=True):
            into.add_(block.double(), alpha=clip_factor(norm, self._clip))
        self._halves += 0.5 if norm <= self._clip else -0.5

    def means(self) -> tuple[Tensor, ...]:
        if not self._means:
            self._means = tuple(
                ((each + gaussian(each.numel(), self._deviation, self._bits)) / self._cohort).to(like.dtype)
                for each, like in zip(self._sums, self._blank, strict=True)
            )
        return self._means

    def share_below(self) -> float:
        """Perhaps below 0 or above 1."""
        if self._share is None:
            noise = float(gaussian(1, self._count_deviation, self._bits))
            self._share = (self._halves + noise) / self._cohort + 0.5
        return self._share

    def summary(self, clients: int) -> CohortSummary:
        """As expected: who came, and what they did, is not told."""
        return CohortSummary(contributions=self._cohort, clients=clients, steps=1.0)


def sum_for(strategy: FederatedStrategy, guard: PrivacyGuard | None = None) -> ContributionSum:
    """How contributions of such a strategy are summed. guard: of its privacy, where it has one."""
    if guard is not None:
        privacy = guard.privacy
        return PrivateSum(guard, privacy) if isinstance(privacy, CentralPrivacy) else EqualMean()
    return StreamedMean() if strategy.aggregator.is_linear else Kept(strategy.aggregator)

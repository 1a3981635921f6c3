"""Robust aggregators: outliers among a cohort's contributions have a bounded influence."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.aggregator import Aggregator
from gossamer.errors import require

COLUMNS = 1 << 16  # number of columns per matrix product


class OrderStatistic(Aggregator):
    """Base class of rules for each entry separately, computed from the devices' sorted values."""

    @property
    def by_entry(self) -> bool:
        return True

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        rows = finite_rows(contributions).sort(dim=0).values
        return self.of_sorted(rows) if len(rows) else torch.zeros_like(contributions[0])

    @abstractmethod
    def of_sorted(self, rows: Tensor) -> Tensor:
        """Return (n,) for (k, n), with every column in ascending order; k is 1 or more."""


@dataclass(frozen=True, repr=False)
class Median(OrderStatistic):
    """The entrywise median of the contributions.

    the middle one of x_1j, ..., x_kj; the mean of the two in the middle where k is even
    law:    fewer than half of the contributions, with any values, leave it between those of the others
    source: Yin et al. 2018, ICML

    All robust aggregators ignore weights, since a device that sends a false update may send a false number of samples.
    They drop a contribution with a value that is not finite; without other contributions the result is zero, and the
    parameters do not change.

    Example:
        >>> gossamer.FedAvg(aggregator=gossamer.Median())
        FedAvg(aggregator=Median())
    """

    def of_sorted(self, rows: Tensor) -> Tensor:
        return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2


@dataclass(frozen=True, repr=False)
class TrimmedMean(OrderStatistic):
    """The entrywise mean of the contributions without the largest and the smallest values.

    the mean of x_j without its floor(share k) largest and floor(share k) smallest of k
    law:    up to floor(share k) contributions, with any values, leave it between the minimum and the maximum of the
            others; share 0 is the plain mean
    source: Yin et al. 2018, ICML

    The paper calls `share` beta.

    Args:
        share: fraction of the contributions that is dropped at each end, in [0, 0.5).

    Example:
        >>> gossamer.FedAvg(aggregator=gossamer.TrimmedMean(share=0.2))
        FedAvg(aggregator=TrimmedMean(share=0.2))
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        require(
            0 <= self.share < 0.5,
            f"share must be the fraction dropped at each end, 0 or more and below 0.5, got {self.share}. Write "
            "TrimmedMean(share=0.1).",
        )

    def of_sorted(self, rows: Tensor) -> Tensor:
        cut = floor(self.share * len(rows) + 1e-9)
        return rows[cut : len(rows) - cut].mean(dim=0)


@dataclass(frozen=True, repr=False)
class MultiKrum(Aggregator):
    """The mean of the contributions that are closest to others; each contribution is used or dropped as a whole.

    score of x_i = sum of its squared distances to the k - f - 2 others that are closest, f = ceil(outliers k);
    the mean of the k - f contributions of least score
    law:    with outliers 0 the plain mean; where 2 f + 2 < k, f that are far from the others are dropped
    source: Blanchard et al. 2017, NeurIPS

    The paper calls k n, and the number of selected contributions, k - f here, m. Each version computes k (k - 1) / 2
    distances. If k - f - 2 is below 1, the score uses the closest contribution.

    Args:
        outliers: largest fraction of the contributions that may have any values (Byzantine), in [0, 0.5).

    Example:
        >>> gossamer.FedAvg(aggregator=gossamer.MultiKrum(outliers=0.2))
        FedAvg(aggregator=MultiKrum())
    """

    outliers: float = 0.2

    def __post_init__(self) -> None:
        require(
            0 <= self.outliers < 0.5,
            f"outliers must be a fraction of the contributions, 0 or more and below 0.5, got {self.outliers}. Write "
            "MultiKrum(outliers=0.2).",
        )

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        rows = finite_rows(contributions)
        if not len(rows):
            return torch.zeros_like(contributions[0])
        left_out = len(contributions) - len(rows)
        outliers = max(ceil(self.outliers * len(contributions) - 1e-9) - left_out, 0)
        if not outliers:
            return rows.mean(dim=0)
        closest = max(len(rows) - outliers - 2, 1)
        scores = square_distances(rows).sort(dim=1).values[:, 1 : 1 + closest].sum(dim=1)  # excludes the row itself
        kept = scores.argsort(stable=True)[: max(len(rows) - outliers, 1)].sort().values
        return rows[kept].mean(dim=0)


def finite_rows(contributions: Tensor) -> Tensor:
    """Return the contributions with finite values only: (up to k, n)."""
    finite = torch.stack([row.isfinite().all() for row in contributions])
    return contributions if bool(finite.all()) else contributions[finite]


def square_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between all rows: (k, k), in float64, in which squares of float32 do not overflow.

    The diagonal is -1, so that sorting places a row itself first.
    """
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(COLUMNS, dim=1):
        wide = part.double()
        products += wide @ wide.T
    norms = products.diagonal()
    found = (norms[:, None] + norms[None, :] - 2 * products).clamp_(min=0).nan_to_num_(nan=torch.inf)
    return found.fill_diagonal_(-1)

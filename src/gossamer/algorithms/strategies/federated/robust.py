"""Robust means: outliers among a cohort's contributions do not move them far."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated.aggregator import Aggregator
from gossamer.errors import require

COLUMNS = 1 << 16  # whose products are added up at once


class OrderStatistic(Aggregator):
    """A rule for each entry by itself, of what devices say of it in ascending order."""

    @property
    def by_entry(self) -> bool:
        return True

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        rows = finite_rows(contributions).sort(dim=0).values
        return self.of_sorted(rows) if len(rows) else torch.zeros_like(contributions[0])

    @abstractmethod
    def of_sorted(self, rows: Tensor) -> Tensor:
        """(n,) of (k, n), every column of which ascends; k is 1 or more."""


@dataclass(frozen=True, repr=False)
class Median(OrderStatistic):
    """The middle of what devices say, entry by entry.

    the middle one of x_1j, ..., x_kj; the mean of the two in the middle where k is even
    law:    fewer than half of the contributions, whatever they hold, leave it between those of the others
    source: Yin et al. 2018, ICML

    All robust means: weights are left aside, since who lies about its update may lie about its samples; a contribution
    with a number that is not finite is left out whole, and without any other the result is zero: nothing moves.
    """

    def of_sorted(self, rows: Tensor) -> Tensor:
        return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2


@dataclass(frozen=True, repr=False)
class TrimmedMean(OrderStatistic):
    """The mean of what devices say without the largest and the smallest, entry by entry.

    the mean of x_j without its floor(share k) largest and floor(share k) smallest of k
    law:    up to floor(share k) contributions, whatever they hold, leave it between the least and the most of the
            others; share 0 is the plain mean
    source: Yin et al. 2018, ICML
    """

    share: float = 0.1  # of the contributions, that is left out at each end

    def __post_init__(self) -> None:
        require(
            0 <= self.share < 0.5,
            f"share is left out at either end, so it is 0 or more and below a half, not {self.share}: write "
            "TrimmedMean(share=0.1)",
        )

    def of_sorted(self, rows: Tensor) -> Tensor:
        cut = floor(self.share * len(rows) + 1e-9)
        return rows[cut : len(rows) - cut].mean(dim=0)


@dataclass(frozen=True, repr=False)
class MultiKrum(Aggregator):
    """The mean of the contributions that lie closest to others, each taken or left as a whole.

    score of x_i = sum of its squared distances to the k - f - 2 others that are closest, f = ceil(outliers k);
    the mean of the k - f contributions of least score
    law:    with outliers 0 the plain mean; where 2 f + 2 < k, f that lie far from the others are left out
    source: Blanchard et al. 2017, NeurIPS

    k (k - 1) / 2 distances are computed for each version. Where `outliers` is so large for so few contributions that no
    other would be close, the closest one counts.
    """

    outliers: float = 0.2  # largest share of the contributions that may be anything

    def __post_init__(self) -> None:
        require(
            0 <= self.outliers < 0.5,
            f"outliers is a share of the contributions, 0 or more and below a half, not {self.outliers}: write "
            "MultiKrum(outliers=0.2)",
        )

    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        rows = finite_rows(contributions)
        if not len(rows):
            return torch.zeros_like(contributions[0])
        left_out = len(contributions) - len(rows)
        liars = max(ceil(self.outliers * len(contributions) - 1e-9) - left_out, 0)
        if not liars:
            return rows.mean(dim=0)
        closest = max(len(rows) - liars - 2, 1)
        scores = square_distances(rows).sort(dim=1).values[:, 1 : 1 + closest].sum(dim=1)  # without itself
        kept = scores.argsort(stable=True)[: max(len(rows) - liars, 1)].sort().values
        return rows[kept].mean(dim=0)


def finite_rows(contributions: Tensor) -> Tensor:
    """The contributions of which every number is finite: (up to k, n)."""
    finite = torch.stack([row.isfinite().all() for row in contributions])
    return contributions if bool(finite.all()) else contributions[finite]


def square_distances(rows: Tensor) -> Tensor:
    """Between all rows: (k, k), in float64, in which squares of float32 do not overflow. On the diagonal: -1, so that a
    row is always the first of its own neighbors."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(COLUMNS, dim=1):
        wide = part.double()
        products += wide @ wide.T
    norms = products.diagonal()
    found = (norms[:, None] + norms[None, :] - 2 * products).clamp_(min=0).nan_to_num_(nan=torch.inf)
    return found.fill_diagonal_(-1)

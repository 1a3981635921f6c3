"""Robust means against brute force, and against devices that send whatever they like."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import ceil, floor, inf, nan
from statistics import median

import pytest
import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import Aggregator, Median, MultiKrum, TrimmedMean, WeightedMean
from gossamer.algorithms.strategies.federated_rules.robust import COLUMNS, square_distances

ROBUST = (Median(), TrimmedMean(share=0.3), MultiKrum(outliers=0.3))


def cohort(k: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(-50, 50, (k, n), generator=random).double()
    return rows, torch.randint(1, 9, (k,), generator=random).double()


def by_entry(rows: Tensor, rule: Callable[[list[float]], float]) -> Tensor:
    return torch.tensor([rule(sorted(column.tolist())) for column in rows.T], dtype=rows.dtype)


def trimmed(share: float) -> Callable[[list[float]], float]:
    def rule(values: list[float]) -> float:
        cut = floor(share * len(values) + 1e-9)
        kept = values[cut : len(values) - cut]
        return sum(kept) / len(kept)

    return rule


def krum(rows: Tensor, outliers: float) -> Tensor:
    k = len(rows)
    liars = ceil(outliers * k - 1e-9)
    if not liars:
        return rows.mean(dim=0)
    squares = [[sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in rows.tolist()] for x in rows.tolist()]
    closest = max(k - liars - 2, 1)
    scores = [sum(sorted(squares[i][j] for j in range(k) if j != i)[:closest]) for i in range(k)]
    kept = sorted(range(k), key=lambda i: scores[i])[: max(k - liars, 1)]
    return torch.stack([rows[i] for i in sorted(kept)]).mean(dim=0)


@pytest.mark.parametrize("k", range(1, 9))
def test_they_are_what_brute_force_finds(k: int) -> None:
    for seed in range(5):
        rows, weights = cohort(k, 6, seed)
        assert torch.equal(Median().combine(rows, weights), by_entry(rows, median))
        for share in (0.0, 0.1, 0.34, 0.49):
            found = TrimmedMean(share=share).combine(rows, weights)
            assert torch.allclose(found, by_entry(rows, trimmed(share)), rtol=0, atol=1e-12)
        for outliers in (0.0, 0.2, 0.45):
            found = MultiKrum(outliers=outliers).combine(rows, weights)
            assert torch.allclose(found, krum(rows, outliers), rtol=0, atol=1e-12)


def test_brute_force_would_find_another_rule() -> None:
    rows, weights = cohort(7, 6)
    assert not torch.allclose(MultiKrum(outliers=0.2).combine(rows, weights), krum(rows, 0.45))
    assert not torch.allclose(TrimmedMean(share=0.1).combine(rows, weights), by_entry(rows, trimmed(0.34)))
    assert not torch.allclose(rows.mean(dim=0), by_entry(rows, median))


LIES = (1e30, -1e30, 1e300, inf, -inf, nan, 0.0)


def within_the_honest(aggregator: Aggregator, lie: float) -> bool:
    """Whether two liars among seven leave the result between the least and the most of the others, entry by entry."""
    honest, _ = cohort(5, 6)
    lowest, highest = honest.min(dim=0).values - 1e-9, honest.max(dim=0).values + 1e-9
    weights = torch.tensor([1.0] * 7, dtype=torch.float64)
    for places in combinations(range(7), 2):
        rows = torch.full((7, 6), lie, dtype=torch.float64)
        rows[[each for each in range(7) if each not in places]] = honest
        weights[list(places)] = 1e9  # liars also say that they have all the data
        found = aggregator.combine(rows.clone(), weights)
        if not bool(((found >= lowest) & (found <= highest)).all()):
            return False
    return True


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("aggregator", ROBUST, ids=repr)
def test_two_liars_of_seven_do_not_move_it_out_of_the_others(aggregator: Aggregator, lie: float) -> None:
    assert within_the_honest(aggregator, lie)


@pytest.mark.parametrize("aggregator", [WeightedMean(), TrimmedMean(share=0.1), MultiKrum(outliers=0.1)], ids=repr)
def test_means_that_expect_no_two_liars_are_moved(aggregator: Aggregator) -> None:
    assert not within_the_honest(aggregator, 1e30)


@pytest.mark.parametrize("aggregator", ROBUST, ids=repr)
def test_where_nothing_is_finite_nothing_moves(aggregator: Aggregator) -> None:
    found = aggregator.combine(torch.full((3, 4), nan), torch.ones(3))
    assert torch.equal(found, torch.zeros(4))


@pytest.mark.parametrize("aggregator", ROBUST, ids=repr)
def test_the_order_of_arrival_and_the_input_do_not_matter(aggregator: Aggregator) -> None:
    rows, weights = cohort(6, 5)
    before = rows.clone()
    found = aggregator.combine(rows, weights)
    assert torch.equal(rows, before)
    assert torch.allclose(aggregator.combine(rows.flip(0), weights.flip(0)), found, rtol=0, atol=1e-12)


def test_distances_are_added_up_over_all_columns() -> None:
    rows = torch.zeros(3, COLUMNS + 2)
    rows[1, 0], rows[1, COLUMNS], rows[2, COLUMNS + 1] = 3.0, 4.0, 2e25  # whose square float32 does not hold
    found = square_distances(rows)
    assert found.diagonal().tolist() == [-1.0] * 3
    assert found[0, 1] == found[1, 0] == 25.0
    assert found[0, 2] == pytest.approx(4e50)


@pytest.mark.parametrize("bad", [-0.1, 0.5, 1.0])
def test_a_half_of_liars_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"below 0.5, got .* Write TrimmedMean"):
        TrimmedMean(share=bad)
    with pytest.raises(ValueError, match=r"below 0.5, got .* Write MultiKrum"):
        MultiKrum(outliers=bad)


def test_rows_that_are_not_finite_count_as_outliers_of_krum() -> None:
    """Of seven, two may be outliers: one is not finite, so only one more is left out."""
    rows, _ = cohort(6, 6)
    given = torch.cat([rows, torch.full((1, 6), nan, dtype=rows.dtype)])
    found = MultiKrum(outliers=2 / 7).combine(given, torch.ones(7, dtype=torch.float64))
    assert torch.allclose(found, krum(rows, 1 / 6), rtol=0, atol=1e-12)
    assert not torch.allclose(found, krum(rows, 2 / 6))

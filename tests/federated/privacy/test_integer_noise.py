"""Integer noise: tables equal the distributions, and draws follow them, by z-scores."""

from __future__ import annotations

from math import exp, lgamma, log, sqrt

import numpy
import pytest
import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated.privacy.terms import DISCRETE_GAUSSIAN, SKELLAM
from gossamer.federated.privacy import noise as integer_noise_module
from gossamer.federated.privacy.noise import SeededBits, Words, integer_noise

COUNT = 200_000
LARGEST_Z = 4.5


def skellam(place: int, variance: float) -> float:
    """As a sum over pairs of Poisson numbers, each of half the variance."""
    mean = variance / 2

    def poisson(number: int) -> float:
        return exp(number * log(mean) - mean - lgamma(number + 1))

    return sum(poisson(number) * poisson(number + abs(place)) for number in range(int(variance) + 60))


def discrete_gaussian(place: int, variance: float) -> float:
    total = sum(exp(-(each**2) / (2 * variance)) for each in range(-200, 201))
    return exp(-(place**2) / (2 * variance)) / total


def chi_square_z(drawn: Tensor, variance: float, mechanism: str) -> float:
    """Of the counts of small integers, and of all others together."""
    rule = {SKELLAM: skellam, DISCRETE_GAUSSIAN: discrete_gaussian}[mechanism]
    most = max(int(2.5 * sqrt(variance)), 2)
    chances = [rule(place, variance) for place in range(-most, most + 1)]
    expected = torch.tensor([*chances, 1 - sum(chances)], dtype=torch.float64) * len(drawn)
    inside = drawn[drawn.abs() <= most] + most
    found = torch.bincount(inside, minlength=len(chances)).double()
    found = torch.cat([found, torch.tensor([len(drawn) - len(inside)], dtype=torch.float64)])
    chi_square = float(((found - expected) ** 2 / expected).sum())
    return (chi_square - len(expected) + 1) / sqrt(2 * (len(expected) - 1))


@pytest.mark.parametrize("mechanism", [SKELLAM, DISCRETE_GAUSSIAN])
@pytest.mark.parametrize("variance", [0.7, 9.0, 120.0])
def test_draws_follow_the_distribution(mechanism: str, variance: float) -> None:
    drawn = integer_noise(COUNT, variance, mechanism, SeededBits(7))
    assert abs(float(drawn.double().mean())) < LARGEST_Z * sqrt(variance / COUNT)
    assert chi_square_z(drawn, variance, mechanism) < LARGEST_Z + 1
    half = integer_noise(COUNT, variance / 4, mechanism, SeededBits(7))  # the twin: half of the deviation
    assert chi_square_z(half, variance, mechanism) > 100


@pytest.mark.parametrize("mechanism", [SKELLAM, DISCRETE_GAUSSIAN])
@pytest.mark.parametrize("deviation", [30.0, 2048.0])
def test_the_variance_of_wide_noise(mechanism: str, deviation: float) -> None:
    drawn = integer_noise(COUNT, deviation**2, mechanism, SeededBits(2)).double()
    z = (float(drawn.square().mean()) / deviation**2 - 1) * sqrt(COUNT / 2)
    assert abs(z) < LARGEST_Z


def test_a_sum_of_skellam_integers_is_one() -> None:
    parts = [integer_noise(COUNT, 3.0, SKELLAM, SeededBits(seed)) for seed in range(4)]
    assert chi_square_z(sum(parts, torch.zeros(COUNT, dtype=torch.int64)), 12.0, SKELLAM) < LARGEST_Z + 1


def test_no_noise_and_too_much_are_refused() -> None:
    for variance in (0.0, -1.0, 1e12, float("nan")):
        with pytest.raises(ValueError, match="variance"):
            integer_noise(3, variance, SKELLAM, SeededBits(0))


class _Told(SeededBits):
    """Words in the order in which they are given here."""

    def __init__(self, *words: list[int]) -> None:
        self._told = [numpy.array(each, dtype=numpy.uint64) for each in words]

    def words(self, count: int) -> Words:
        return self._told.pop(0)[:count]


def test_a_second_word_decides_where_the_first_does_not() -> None:
    table = integer_noise_module._table(SKELLAM, 9.0)
    middle = table.largest - 1  # the end of the draws below 0
    first, second = table.ends[middle] >> 64, table.ends[middle] & (2**64 - 1)
    for word, wanted in ((0, -1), (second - 1, -1), (second, 0), (2**64 - 1, 0)):
        assert integer_noise(1, 9.0, SKELLAM, _Told([first], [word])).item() == wanted
    assert integer_noise(1, 9.0, SKELLAM, _Told([first - 1], [])).item() == -1
    never = table.ends.count(0)  # so far out that 128 bits do not reach them
    assert integer_noise(1, 9.0, SKELLAM, _Told([0], [0])).item() == never - table.largest < -40
    assert integer_noise(1, 9.0, SKELLAM, _Told([2**64 - 1], [2**64 - 1])).item() > 40

"""Noise: distributions of Gaussian and integer draws, from the operating system or a seed."""

from __future__ import annotations

from math import erf, exp, lgamma, log, sqrt

import numpy
import pytest
import torch
from support.seeded_bits import SeededBits
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.privacy.terms import DISCRETE_GAUSSIAN, SKELLAM
from gossamer.federated.privacy import noise_sampling as integer_noise_module
from gossamer.federated.privacy.noise_sampling import (
    GAUSSIAN_PIECE,
    RandomBits,
    SystemBits,
    Words,
    gaussian,
    integer_noise,
)

COUNT = 300_000
LARGEST_Z = 4.5
CELLS = torch.linspace(-3, 3, 25, dtype=torch.float64)


def z_scores(drawn: Tensor, deviation: float) -> dict[str, float]:
    """Of the mean, the variance, and the chi-square of counts in cells, which is nearly Gaussian for so many cells."""
    standard = drawn / deviation
    count = len(standard)
    edges = [0.0, *(0.5 * (1 + erf(float(cell) / sqrt(2))) for cell in CELLS), 1.0]
    expected = torch.tensor(edges, dtype=torch.float64).diff() * count
    found = torch.bincount(torch.bucketize(standard, CELLS), minlength=len(expected)).double()
    chi_square = float(((found - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return {
        "mean": float(standard.mean()) * sqrt(count),
        "variance": (float(standard.square().mean()) - 1) * sqrt(count / 2),
        "chi-square": (chi_square - freedom) / sqrt(2 * freedom),
    }


@pytest.mark.parametrize("bits", [SeededBits(3), SystemBits()])
def test_mean_variance_and_distribution(bits: RandomBits) -> None:
    found = z_scores(gaussian(COUNT, 2.5, bits), 2.5)
    assert max(abs(found["mean"]), abs(found["variance"])) < LARGEST_Z
    assert found["chi-square"] < LARGEST_Z + 1  # its own tail is heavier


def test_half_of_the_noise_is_caught() -> None:
    found = z_scores(gaussian(COUNT, 1.25, SeededBits(3)), 2.5)
    assert abs(found["variance"]) > 100
    assert found["chi-square"] > 1000
    uniform = (torch.rand(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5) * sqrt(12)
    assert abs(z_scores(uniform, 1.0)["variance"]) < LARGEST_Z  # the twin of another distribution
    assert z_scores(uniform, 1.0)["chi-square"] > 1000


def test_neighbors_and_pieces_are_independent() -> None:
    drawn = gaussian(2 * GAUSSIAN_PIECE, 1.0, SeededBits(5))
    for shift in (1, GAUSSIAN_PIECE // 2, GAUSSIAN_PIECE):
        together = drawn[:-shift] @ drawn[shift:] / sqrt(len(drawn) - shift)
        assert abs(float(together)) < LARGEST_Z
    assert len(gaussian(0, 1.0, SystemBits())) == 0
    assert len(gaussian(7, 1.0, SystemBits())) == 7


def test_the_systems_bits_are_new_each_time() -> None:
    assert not torch.equal(gaussian(8, 1.0, SystemBits()), gaussian(8, 1.0, SystemBits()))
    assert torch.equal(gaussian(8, 1.0, SeededBits(1)), gaussian(8, 1.0, SeededBits(1)))


INTEGERS = 200_000


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
    drawn = integer_noise(INTEGERS, variance, mechanism, SeededBits(7))
    assert abs(float(drawn.double().mean())) < LARGEST_Z * sqrt(variance / INTEGERS)
    assert chi_square_z(drawn, variance, mechanism) < LARGEST_Z + 1
    half = integer_noise(INTEGERS, variance / 4, mechanism, SeededBits(7))  # the twin: half of the deviation
    assert chi_square_z(half, variance, mechanism) > 100


@pytest.mark.parametrize("mechanism", [SKELLAM, DISCRETE_GAUSSIAN])
@pytest.mark.parametrize("deviation", [30.0, 2048.0])
def test_the_variance_of_wide_noise(mechanism: str, deviation: float) -> None:
    drawn = integer_noise(INTEGERS, deviation**2, mechanism, SeededBits(2)).double()
    z = (float(drawn.square().mean()) / deviation**2 - 1) * sqrt(INTEGERS / 2)
    assert abs(z) < LARGEST_Z


def test_a_sum_of_skellam_integers_is_one() -> None:
    parts = [integer_noise(INTEGERS, 3.0, SKELLAM, SeededBits(seed)) for seed in range(4)]
    assert chi_square_z(sum(parts, torch.zeros(INTEGERS, dtype=torch.int64)), 12.0, SKELLAM) < LARGEST_Z + 1


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

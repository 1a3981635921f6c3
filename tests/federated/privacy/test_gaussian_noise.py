"""Gaussian noise: has the mean, the variance and the distribution that are asked for, by z-scores."""

from __future__ import annotations

from math import erf, sqrt

import pytest
import torch
from torch import Tensor

from gossamer.federated.privacy.noise import GAUSSIAN_PIECE, RandomBits, SeededBits, SystemBits, gaussian

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

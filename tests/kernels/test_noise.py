"""Random numbers by place: their values, and z-scores of what independent uniform ones would do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer import seeds
from gossamer.kernels.noise import LOW, uniform

N = 1 << 20
KEYS = [seeds.address("noise", step) for step in range(4)]


def by_hand(key: int, place: int) -> float:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
        x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
        return x ^ (x >> 16)

    return (mix((place * 0x9E3779B9 + key) & LOW ^ (key >> 32)) >> 8) / 2**24


def mean_z(u: Tensor) -> float:
    return float((u.double().mean() - 0.5) * math.sqrt(12 * len(u)))


def variance_z(u: Tensor) -> float:
    """The square of a centred uniform number has mean 1/12 and variance 1/180."""
    squares = (u.double() - 0.5).square()
    return float((squares.mean() - 1 / 12) * math.sqrt(180 * len(u)))


def pair_z(u: Tensor, v: Tensor) -> float:
    """Products of two independent centred ones have mean 0 and variance 1/144."""
    return float(((u.double() - 0.5) * (v.double() - 0.5)).mean() * 12 * math.sqrt(len(u)))


def bins_z(u: Tensor, v: Tensor) -> float:
    """Chi squared of pairs over 32 x 32 cells, as a z-score."""
    cells = (u * 32).long() * 32 + (v * 32).long()
    counts = torch.bincount(cells, minlength=1024).double()
    due = len(u) / 1024
    return (float(((counts - due).square() / due).sum()) - 1023) / math.sqrt(2 * 1023)


@pytest.mark.parametrize("key", [0, 1, *KEYS, 2**63 - 1])
def test_values_by_hand(key: int) -> None:
    found = uniform(key, 1000)
    assert found.dtype == torch.float32
    assert found.tolist() == [by_hand(key, place) for place in range(1000)]
    assert 0 <= float(found.min()) <= float(found.max()) < 1


def test_values_do_not_depend_on_how_many_are_drawn() -> None:
    assert torch.equal(uniform(KEYS[0], 1000)[:10], uniform(KEYS[0], 10))


@pytest.mark.parametrize("key", KEYS)
def test_mean_and_variance(key: int) -> None:
    u = uniform(key, N)
    assert abs(mean_z(u)) <= 4.5
    assert abs(variance_z(u)) <= 4.5


@pytest.mark.parametrize("distance", [1, 2, 16, 256, 4096])
def test_neighbouring_places_are_independent(distance: int) -> None:
    u = uniform(KEYS[0], N)
    assert abs(pair_z(u[distance:], u[:-distance])) <= 4.5
    assert abs(bins_z(u[distance:], u[:-distance])) <= 4.5


@pytest.mark.parametrize("other", [KEYS[0] + 1, KEYS[0] ^ (1 << 32), KEYS[0] ^ (1 << 62), *KEYS[1:]])
def test_neighbouring_keys_are_independent(other: int) -> None:
    u, v = uniform(KEYS[0], N), uniform(other, N)
    assert abs(pair_z(u, v)) <= 4.5
    assert abs(bins_z(u, v)) <= 4.5


def test_the_scores_see_numbers_that_are_not_random() -> None:
    """The broken twins: too even ones, ones that follow their neighbours, ones that only moved."""
    even = torch.arange(N) / N
    u = uniform(KEYS[0], N)
    assert abs(pair_z(even[1:], even[:-1])) > 4.5
    assert abs(bins_z(u, 1 - u)) > 4.5
    assert abs(bins_z(u[1:], (u[1:] + u[:-1]) / 2)) > 4.5
    assert abs(mean_z(u * 0.99)) > 4.5
    assert abs(variance_z(u * 0.99 + 0.005)) > 4.5

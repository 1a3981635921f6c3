"""Counter-based random numbers: their values, and z-scores of what independent uniform ones would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels.reference.counter_rng import LOW, paired, stochastic, uniform

N = 1 << 20
KEYS = [rng.address("noise", step) for step in range(4)]


def hash_by_hand(key: int, place: int) -> int:
    x = (place * 0x9E3779B9 + key) & LOW ^ (key >> 32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


def by_hand(key: int, place: int) -> float:
    return (hash_by_hand(key, place) >> 8) / 2**24


def paired_by_hand(key: int, place: int) -> int:
    group, within = divmod(place, 32)
    found = hash_by_hand(key, 16 * group + within % 16)
    return found if within < 16 else (found << 16 | found >> 16) & LOW


def halves(key: int) -> Tensor:
    return paired(key, N).float() / 2**24


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


@pytest.mark.parametrize("key", [0, 1, *KEYS, 2**63 - 1])
def test_paired_values_by_hand(key: int) -> None:
    for bits in (16, 24):
        found = paired(key, 1000, bits=bits)
        assert found.dtype == torch.int32
        assert found.tolist() == [paired_by_hand(key, place) >> (32 - bits) for place in range(1000)]
    assert torch.equal(paired(key, 1000)[:10], paired(key, 10))


every_draw = pytest.mark.parametrize("draw", [lambda key: uniform(key, N), halves], ids=["uniform", "paired"])


@every_draw
@pytest.mark.parametrize("key", KEYS)
def test_mean_and_variance(draw: Callable[[int], Tensor], key: int) -> None:
    u = draw(key)
    assert abs(mean_z(u)) <= 4.5
    assert abs(variance_z(u)) <= 4.5


@every_draw
@pytest.mark.parametrize("distance", [1, 2, 16, 32, 256, 4096])
def test_neighbouring_places_are_independent(draw: Callable[[int], Tensor], distance: int) -> None:
    u = draw(KEYS[0])
    assert abs(pair_z(u[distance:], u[:-distance])) <= 4.5
    assert abs(bins_z(u[distance:], u[:-distance])) <= 4.5


@pytest.mark.parametrize("key", KEYS)
def test_places_that_share_a_hash_are_independent(key: int) -> None:
    u, v = halves(key).view(-1, 2, 16).unbind(1)
    assert abs(pair_z(u.reshape(-1), v.reshape(-1))) <= 4.5
    assert abs(bins_z(u.reshape(-1), v.reshape(-1))) <= 4.5


def test_all_bits_are_even() -> None:
    n = N // 8
    ones = (paired(KEYS[0], n)[:, None] >> torch.arange(24) & 1).sum(0)
    assert float((ones - n / 2).abs().max()) <= 4.5 * math.sqrt(n) / 2


@every_draw
@pytest.mark.parametrize("other", [KEYS[0] + 1, KEYS[0] ^ (1 << 32), KEYS[0] ^ (1 << 62), *KEYS[1:]])
def test_neighbouring_keys_are_independent(draw: Callable[[int], Tensor], other: int) -> None:
    u, v = draw(KEYS[0]), draw(other)
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


@pytest.mark.parametrize(("most", "bits"), [(1, 24), (127, 24), (128, 23), (2**15 - 1, 16)])
def test_rounding_by_hand(most: int, bits: int) -> None:
    """floor(w / unit + u) exactly, for units whose inverse is exact, also where that is beyond float32."""
    w = most * torch.linspace(-1.2, 1.2, 97)
    drawn = [paired_by_hand(KEYS[0], place) >> (32 - bits) for place in range(97)]
    for power in (0, -20, 60, -130):
        unit = torch.full((97,), 2.0**power)
        due = []
        for x, r in zip((w * unit).tolist(), drawn, strict=True):
            steps = math.trunc(Fraction(x) / Fraction(2.0**power) * 2**bits)
            due.append((max(-most * 2**bits, min(most * 2**bits, steps)) + r) >> bits)
        assert stochastic(w * unit, unit, most, KEYS[0]).tolist() == due
    assert not stochastic(w, torch.zeros(97), most, KEYS[0]).any()


@pytest.mark.parametrize("ratio", [1e-3, 0.3, -0.3, 5.875, -100.001])
@pytest.mark.parametrize("most", [127, 2**15 - 1])
def test_rounding_is_right_on_average(ratio: float, most: int) -> None:
    rounded = stochastic(torch.full((N,), ratio), torch.ones(N), most, KEYS[1]).double()
    part = ratio - math.floor(ratio)
    assert set(rounded.unique().tolist()) == {math.floor(ratio), math.floor(ratio) + 1}
    assert abs(float(rounded.mean()) - ratio) <= 4.5 * math.sqrt(part * (1 - part) / N)
    assert abs(float(rounded.mean()) - ratio - 0.01) > 4.5 * math.sqrt(part * (1 - part) / N)

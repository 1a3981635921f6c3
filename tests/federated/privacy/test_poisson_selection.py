"""Poisson selection: each device by a coin of its own."""

from __future__ import annotations

from math import sqrt

import pytest

from gossamer.federated.privacy.guard import PoissonSelection
from gossamer.federated.privacy.noise import SeededBits


def test_sizes_and_pairs_are_those_of_independent_coins() -> None:
    policy, rounds = PoissonSelection(0.2, SeededBits(4)), 4000
    drawn = [policy.choose(range(30), 6, index) for index in range(rounds)]
    sizes = [len(each) for each in drawn]
    mean = sum(sizes) / rounds
    variance = sum((size - mean) ** 2 for size in sizes) / (rounds - 1)
    assert abs(mean - 6.0) < 4.5 * sqrt(4.8 / rounds)
    assert abs(variance / 4.8 - 1) < 4.5 * sqrt(2 / rounds) * 1.1  # a cohort of fixed size would have none
    both = sum(3 in each and 17 in each for each in drawn)
    assert abs(both - 0.04 * rounds) < 4.5 * sqrt(0.04 * rounds)
    assert all(each == sorted(each) for each in drawn)


def test_coins_cannot_be_guessed_from_a_seed() -> None:
    one, other = PoissonSelection(0.5), PoissonSelection(0.5)
    assert one.choose(range(200), 100, 0) != other.choose(range(200), 100, 0)
    assert PoissonSelection(1.0).choose([2, 5], 1, 0) == [2, 5]
    with pytest.raises(ValueError, match="rate"):
        PoissonSelection(0.0)

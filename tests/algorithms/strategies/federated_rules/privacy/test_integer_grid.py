"""Integer grid: as fine as the bits allow, with room for the noise."""

from __future__ import annotations

from math import sqrt

import pytest

from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import SPARE, TAIL, WIDEST, IntegerGrid


@pytest.mark.parametrize("bits", [8, 12, 16, 32])
@pytest.mark.parametrize("entries", [1, 1000, 1_000_000])
@pytest.mark.parametrize("survivors", [2, 60])
def test_numbers_and_noise_fit_into_the_bits(bits: int, entries: int, survivors: int) -> None:
    try:
        grid = IntegerGrid(clip=3.0, noise=1.0, entries=entries, bits=bits, survivors=survivors)
    except ValueError:
        assert bits == 8 or entries == 1_000_000
        return
    deviation = sqrt(grid.local_variance)
    assert grid.units + 1 + TAIL * deviation + SPARE <= grid.largest + 1e-6
    assert deviation <= WIDEST
    assert deviation * sqrt(survivors) == pytest.approx(1.0 * grid.norm)  # the survivors' noise is all of it
    assert grid.unit * grid.units == pytest.approx(3.0)
    assert grid.norm >= grid.units
    finer = IntegerGrid(clip=3.0, noise=1.0, entries=entries, bits=min(bits + 1, 32), survivors=survivors)
    assert finer.units >= grid.units


def test_rounding_costs_little_where_the_grid_is_fine() -> None:
    fine = IntegerGrid(clip=1.0, noise=1.0, entries=100_000, bits=16, survivors=60)
    coarse = IntegerGrid(clip=1.0, noise=1.0, entries=100_000, bits=10, survivors=60)
    assert fine.norm / fine.units < 1.01
    assert coarse.norm / coarse.units > 1.4


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SecureAggregation\(bits=8\)"):
        IntegerGrid(clip=1.0, noise=5.0, entries=100, bits=4, survivors=2)

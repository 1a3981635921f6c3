from math import cos, pi

import pytest

from gossamer.algorithms.topologies import Ring

FIRST = {1: (), 2: (1,), 3: (1, 2), 4: (1, 3), 5: (1, 4), 6: (1, 5), 7: (1, 6), 8: (1, 7), 9: (1, 8), 16: (1, 15)}
LAST = {1: (), 2: (0,), 3: (0, 1), 4: (0, 2), 5: (0, 3), 6: (0, 4), 7: (0, 5), 8: (0, 6), 9: (0, 7), 16: (0, 14)}


def test_the_two_next_to_a_rank():
    assert {world: Ring().sends_to(0, world, 0) for world in FIRST} == FIRST
    assert {world: Ring().sends_to(world - 1, world, 0) for world in LAST} == LAST
    assert [Ring().peers(rank, 5) for rank in range(5)] == [(1, 4), (0, 2), (1, 3), (2, 4), (0, 3)]


def test_weights_are_thirds():
    assert Ring().weights(0, 8, 0) == ((0, pytest.approx(1 / 3, abs=1e-15)), (1, 1 / 3), (7, 1 / 3))
    assert Ring().weights(1, 2, 0) == ((0, 0.5), (1, 0.5))


@pytest.mark.parametrize("world", [3, 4, 5, 8, 16, 31])
def test_the_second_eigenvalue_is_known(world):
    assert Ring().second_eigenvalue(world) == pytest.approx(1 / 3 + 2 / 3 * cos(2 * pi / world), abs=1e-12)


def test_eight_workers():
    assert round(Ring().second_eigenvalue(8), 6) == 0.804738
    assert round(Ring().spectral_gap(8), 6) == 0.195262

from math import cos, pi

import pytest

from gossamer.algorithms.topologies import Ring, Torus

SIDES = {
    1: (1, 1),
    2: (1, 2),
    3: (1, 3),
    4: (2, 2),
    5: (1, 5),
    6: (2, 3),
    7: (1, 7),
    8: (2, 4),
    9: (3, 3),
    12: (3, 4),
    16: (4, 4),
    18: (3, 6),
}


def test_sides_are_as_equal_as_they_can_be():
    assert {world: Torus().sides(world) for world in SIDES} == SIDES


def test_the_four_around_a_rank():
    assert [Torus().sends_to(rank, 9, 0) for rank in (0, 4, 8)] == [(1, 2, 3, 6), (1, 3, 5, 7), (2, 5, 6, 7)]
    assert [Torus().sends_to(rank, 12, 0) for rank in (0, 5, 11)] == [(1, 3, 4, 8), (1, 4, 6, 9), (3, 7, 8, 10)]


def test_two_ways_to_the_same_rank_are_one():
    assert [Torus().sends_to(rank, 4, 0) for rank in range(4)] == [(1, 2), (0, 3), (0, 3), (1, 2)]
    wanted = [(1, 2, 3), (0, 2, 4), (0, 1, 5), (0, 4, 5), (1, 3, 5), (2, 3, 4)]
    assert [Torus().sends_to(rank, 6, 0) for rank in range(6)] == wanted


@pytest.mark.parametrize("world", [2, 3, 5, 7, 11])
def test_a_prime_number_of_workers_is_a_ring(world):
    assert [Torus().peers(rank, world) for rank in range(world)] == [Ring().peers(rank, world) for rank in range(world)]
    assert Torus().place(1, world) == Ring().place(1, world)


@pytest.mark.parametrize("world", [9, 12, 15, 16, 18, 25])
def test_the_second_eigenvalue_is_known(world):
    _, columns = Torus().sides(world)
    assert Torus().second_eigenvalue(world) == pytest.approx(3 / 5 + 2 / 5 * cos(2 * pi / columns), abs=1e-12)

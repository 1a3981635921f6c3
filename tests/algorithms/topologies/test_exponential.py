from math import cos, pi, prod

import pytest
import torch

from gossamer.algorithms.topologies import Exponential

TOLD = {1: (), 2: (1,), 3: (1, 2), 4: (1, 2), 5: (1, 2, 4), 6: (1, 2, 4), 7: (1, 2, 4), 8: (1, 2, 4), 9: (1, 2, 4, 8)}
HEARD = {1: (), 2: (1,), 3: (1, 2), 4: (2, 3), 5: (1, 3, 4), 6: (2, 4, 5), 7: (3, 5, 6), 8: (4, 6, 7), 9: (1, 5, 7, 8)}


def test_powers_of_two_ahead_are_told_and_behind_are_heard():
    assert {world: Exponential().sends_to(0, world, 0) for world in TOLD} == TOLD
    assert {world: Exponential().receives_from(0, world, 0) for world in HEARD} == HEARD
    assert Exponential().sends_to(0, 16, 3) == (1, 2, 4, 8)
    assert Exponential().receives_from(3, 16, 3) == (1, 2, 11, 15)
    assert Exponential().peers(0, 8) == (1, 2, 4, 6, 7)
    assert not Exponential().mutual


def test_one_peer_at_a_time():
    one = Exponential(one_peer=True)
    assert [one.sends_to(5, 6, round_) for round_ in range(5)] == [(0,), (1,), (3,), (0,), (1,)]
    assert [one.receives_from(0, 6, round_) for round_ in range(5)] == [(5,), (4,), (2,), (5,), (4,)]
    assert [one.rounds(world) for world in range(1, 10)] == [1, 1, 2, 2, 3, 3, 3, 3, 4]
    assert one.weights(0, 6, 1) == ((0, 0.5), (4, 0.5))
    assert one.peers(0, 8) == Exponential().peers(0, 8)


def test_weights_are_equal():
    assert Exponential().weights(0, 8, 0) == ((0, 0.25), (4, 0.25), (6, 0.25), (7, 0.25))
    assert Exponential().mixing(7).equal(Exponential().pushes(7))


def error_of_one_period(world):
    one = Exponential(one_peer=True)
    told = torch.eye(world, dtype=torch.float64)
    for round_ in range(one.rounds(world)):
        told = one.mixing(world, round_) @ told
    return float((told - 1 / world).abs().max())


@pytest.mark.parametrize("world", [*range(1, 13), 16, 24, 32])
def test_one_peer_at_a_time_gives_the_mean_if_and_only_if_workers_are_a_power_of_two(world):
    power = world & (world - 1) == 0
    assert (error_of_one_period(world) == 0) == power
    assert (Exponential(one_peer=True).second_eigenvalue(world) == 0) == power


def test_six_workers_miss_the_mean():
    assert error_of_one_period(6) == pytest.approx(1 / 12, abs=1e-15)


def expected_of_one_peer(world):
    """Every round turns and shrinks a wave of j periods by cos(pi j distance / n)."""
    distances = [2**power for power in range((world - 1).bit_length())]
    waves = [abs(prod(cos(pi * wave * distance / world) for distance in distances)) for wave in range(1, world)]
    return max(waves) ** (1 / len(distances))


@pytest.mark.parametrize("world", [3, 5, 6, 7, 9, 12, 24])
def test_the_second_eigenvalue_of_one_peer_is_known(world):
    assert Exponential(one_peer=True).second_eigenvalue(world) == pytest.approx(expected_of_one_peer(world), abs=1e-12)


@pytest.mark.parametrize("world", [*range(2, 18), 32, 33])
def test_the_spectral_gap_is_as_published(world):
    gap, published = Exponential().spectral_gap(world), 2 / (1 + (world - 1).bit_length())
    assert gap > published - 1e-12
    assert (gap < published + 1e-12) == (world % 2 == 0)

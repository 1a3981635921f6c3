from collections import Counter
from math import sqrt

import pytest
import torch

from gossamer.algorithms.topologies import RandomPeers

# Frozen: ranks of unlike machines and versions of torch must draw the same pairs
DRAWN = {
    (4, 0, 0): [(1,), (0,), (3,), (2,)],
    (5, 0, 0): [(), (4,), (3,), (2,), (1,)],
    (8, 0, 0): [(4,), (7,), (3,), (2,), (0,), (6,), (5,), (1,)],
    (8, 1, 7): [(6,), (5,), (7,), (4,), (3,), (1,), (0,), (2,)],
    (9, 1, 7): [(2,), (), (0,), (6,), (7,), (8,), (3,), (4,), (5,)],
}


@pytest.mark.parametrize(("world", "round_", "seed"), DRAWN)
def test_the_draws_never_change(world, round_, seed):
    found = [RandomPeers().sends_to(rank, world, round_, seed) for rank in range(world)]
    assert found == DRAWN[world, round_, seed]


def test_two_draws_are_joined_and_what_is_drawn_twice_is_one():
    wanted = [(4,), (2, 7), (1, 3), (2, 6), (0,), (6, 7), (3, 5), (1, 5)]
    assert [RandomPeers(count=2).sends_to(rank, 8, 0) for rank in range(8)] == wanted
    assert all(RandomPeers().sends_to(rank, 8, 0)[0] in wanted[rank] for rank in range(8))


def is_a_matching(told):
    resting = [rank for rank, peers in enumerate(told) if not peers]
    paired = all(len(peers) == 1 and told[peers[0]] == (rank,) for rank, peers in enumerate(told) if peers)
    return paired and len(resting) == len(told) % 2


@pytest.mark.parametrize("world", range(1, 17))
def test_every_round_is_a_perfect_matching(world):
    for round_ in range(20):
        assert is_a_matching([RandomPeers().sends_to(rank, world, round_, seed=3) for rank in range(world)])


@pytest.mark.parametrize("broken", [[(1,), (2,), (0,), ()], [(1,), (0,), (), ()], [(1, 2), (0,), (0,), ()]])
def test_what_is_no_matching_is_seen(broken):
    assert not is_a_matching(broken)


def test_a_draw_depends_on_seed_and_round_and_leaves_torch_alone():
    before = torch.get_rng_state()
    drawn = {(seed, round_): RandomPeers().sends_to(0, 64, round_, seed) for seed in range(4) for round_ in range(4)}
    assert len(set(drawn.values())) > 8
    assert torch.get_rng_state().equal(before)


def test_every_pair_is_as_likely():
    """15 pairs of 6, of which a round has 3: each within 5 standard deviations of a fifth of the rounds."""
    rounds = 2000
    met = Counter((rank, *RandomPeers().sends_to(rank, 6, round_)) for round_ in range(rounds) for rank in range(6))
    assert len(met) == 30
    for times in met.values():
        assert abs(times - rounds / 5) < 5 * sqrt(rounds * 0.2 * 0.8)


def test_everyone_is_met_some_time():
    assert RandomPeers().peers(2, 5) == (0, 1, 3, 4)
    assert {peer for round_ in range(200) for peer in RandomPeers().sends_to(2, 5, round_)} == {0, 1, 3, 4}


@pytest.mark.parametrize("world", range(2, 17))
def test_the_expected_decay_of_pairs_is_known(world):
    squared = 1 / 2 if world % 2 else (world - 2) / (2 * (world - 1))
    assert RandomPeers().second_eigenvalue(world) == pytest.approx(sqrt(squared), abs=1e-12)


MATCHINGS_OF_FOUR = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]


def test_over_all_matchings_the_square_of_the_distance_goes_down_as_estimated():
    start = torch.tensor([3.0, -1.0, -4.0, 2.0], dtype=torch.float64)
    squares = [sum((start[one] + start[other]) ** 2 / 2 for one, other in pairs) for pairs in MATCHINGS_OF_FOUR]
    left = RandomPeers().second_eigenvalue(4)
    assert float(sum(squares) / 3) == pytest.approx(left**2 * float(start.square().sum()), abs=1e-12)


def test_two_draws_of_four_are_either_the_same_pairs_or_a_ring():
    """The same with chance 1/3: then |W|^2 = 2, otherwise 4/3."""
    squared = ((2 - 1) / 3 * 1 + (4 / 3 - 1) / 3 * 2) / 3
    assert RandomPeers(count=2).second_eigenvalue(4) ** 2 == pytest.approx(squared, rel=0.08)
    assert RandomPeers().second_eigenvalue(4) ** 2 != pytest.approx(squared, rel=0.08)


@pytest.mark.parametrize("world", [4, 5, 8])
def test_more_draws_decay_as_estimated_from_other_rounds(world):
    peers = RandomPeers(count=2)
    start = torch.arange(world, dtype=torch.float64)
    start -= start.mean()
    squares = [(peers.mixing(world, round_, seed=11) @ start).square().sum() for round_ in range(400)]
    decay = float(torch.stack(squares).mean() / start.square().sum())
    assert decay == pytest.approx(peers.second_eigenvalue(world) ** 2, rel=0.15)
    assert decay != pytest.approx(RandomPeers().second_eigenvalue(world) ** 2, rel=0.15)


def test_somebody_is_talked_to():
    with pytest.raises(ValueError, match="count must be a number of partners per round, 1 or more, got 0"):
        RandomPeers(count=0)

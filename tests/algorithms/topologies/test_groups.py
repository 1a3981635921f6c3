"""Groups: exact means on grids, the expected contraction of shuffled groups, and draws that never change."""

from math import sqrt

import pytest
import torch

from gossamer.algorithms.recipes import resolve
from gossamer.algorithms.topologies import Groups, RandomPeers
from gossamer.errors import RecipeError


def members(size: int, world: int, round_: int, seed: int = 0) -> set[frozenset[int]]:
    return {frozenset((rank, *Groups(size).sends_to(rank, world, round_, seed))) for rank in range(world)}


@pytest.mark.parametrize(("size", "digits"), [(2, 1), (2, 4), (3, 3), (4, 2), (8, 2)])
def test_a_power_of_the_size_has_the_exact_mean_after_as_many_rounds_as_digits_and_not_before(
    size: int, digits: int
) -> None:
    world = size**digits
    x = torch.arange(world, dtype=torch.float64) ** 2
    for round_ in range(digits):
        assert not torch.allclose(x, x.mean().expand(world))
        x = Groups(size).mixing(world, round_) @ x
    assert torch.allclose(x, x.mean().expand(world), rtol=1e-12)
    assert Groups(size).rounds(world) == digits
    assert Groups(size).second_eigenvalue(world) == 0


def test_ranks_of_a_grid_differ_in_one_digit_per_round() -> None:
    assert members(3, 9, 0) == {frozenset({0, 1, 2}), frozenset({3, 4, 5}), frozenset({6, 7, 8})}
    assert members(3, 9, 1) == {frozenset({0, 3, 6}), frozenset({1, 4, 7}), frozenset({2, 5, 8})}
    assert members(3, 9, 2) == members(3, 9, 0)
    assert Groups(3).peers(4, 9) == (1, 3, 5, 7)


@pytest.mark.parametrize("world", [1, 2, 5, 7, 8])
def test_workers_that_fit_into_one_group_average_exactly(world: int) -> None:
    assert members(8, world, round_=3) == {frozenset(range(world))}


@pytest.mark.parametrize(("size", "world"), [(2, 5), (2, 6), (3, 10), (8, 9), (8, 50)])
def test_shuffled_groups_divide_all_ranks_into_almost_equal_parts(size: int, world: int) -> None:
    for round_ in range(20):
        groups = members(size, world, round_, seed=7)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        sizes = [len(group) for group in groups]
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1


def test_groups_depend_on_seed_and_round_and_leave_torch_alone() -> None:
    before = torch.get_rng_state()
    drawn = {(seed, round_): frozenset(members(4, 30, round_, seed)) for seed in range(3) for round_ in range(3)}
    assert len(set(drawn.values())) == 9
    assert torch.get_rng_state().equal(before)


FROZEN = {frozenset({0, 1, 6}), frozenset({2, 5}), frozenset({3, 4})}


def test_draws_never_change() -> None:
    """Ranks of unlike machines and versions of torch must draw the same groups."""
    assert members(3, 7, 0) == FROZEN


@pytest.mark.parametrize(("size", "world"), [(2, 6), (3, 7), (4, 10)])
def test_the_squared_distance_shrinks_as_the_law_states(size: int, world: int) -> None:
    start = torch.arange(world, dtype=torch.float64)
    start -= start.mean()
    squares = torch.stack([(Groups(size).mixing(world, k, seed=11) @ start).square().sum() for k in range(1500)])
    ratios = squares / start.square().sum()
    squared = (-(-world // size) - 1) / (world - 1)
    assert abs(float(ratios.mean()) - squared) < 5 * float(ratios.std()) / sqrt(len(ratios))
    assert Groups(size).second_eigenvalue(world) == pytest.approx(sqrt(squared))


@pytest.mark.parametrize("world", [6, 12, 7])
def test_groups_of_two_contract_as_random_peers(world: int) -> None:
    """With an odd number one rank is alone: then there is a group more than pairs."""
    assert Groups(2).second_eigenvalue(world) == pytest.approx(RandomPeers().second_eigenvalue(world))


@pytest.mark.parametrize("size", [8, 64, 100])
def test_compressed_differences_need_neighbors_that_stay(size: int) -> None:
    with pytest.raises(RecipeError, match="change"):
        resolve(f"Gossip() + Int8() + Groups(size={size})")


def test_a_group_needs_two_ranks() -> None:
    with pytest.raises(ValueError, match=r"size must be a number of ranks, 2 or more, got 1. Write Groups\(size=8\)"):
        Groups(size=1)

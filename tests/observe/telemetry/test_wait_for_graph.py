"""Wait-for graph: its law on random graphs, against a search by brute force."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from gossamer.observe.telemetry.wait_for_graph import roots


@pytest.mark.parametrize(
    ("waits_for", "ranks", "in_cycle"),
    [
        ({0: [1], 1: [2]}, (2,), False),
        ({0: [2], 1: [2], 3: [2]}, (2,), False),
        ({0: [1], 1: [0]}, (0, 1), True),
        ({0: [1], 1: [0], 2: [0, 3]}, (3,), False),
        ({0: [1], 1: [0], 2: [0]}, (0, 1), True),
        ({0: [1, 2], 1: [2], 2: []}, (2,), False),
        ({}, (), False),
    ],
)
def test_chains_and_cycles(waits_for: dict[int, list[int]], ranks: tuple[int, ...], in_cycle: bool) -> None:
    found = roots(waits_for)
    assert (found.ranks, found.in_cycle) == (ranks, in_cycle)


def is_closed(ranks: set[int], waits_for: dict[int, list[int]]) -> bool:
    return all(waits_for.get(rank) and set(waits_for[rank]) <= ranks for rank in ranks)


def smallest_cycle(waits_for: dict[int, list[int]], world: int) -> int:
    return next(
        count
        for count in range(1, world + 1)
        if any(is_closed(set(ranks), waits_for) for ranks in combinations(range(world), count))
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_law(seed: int) -> None:
    """Broken twin: whom the first rank waits for, which is not the root of a chain."""
    draw, world = random.Random(seed), 6
    waits_for = {
        rank: draw.sample([peer for peer in range(world) if peer != rank], draw.choice([1, 1, 2]))
        for rank in range(world)
        if draw.random() < draw.choice([0.7, 1.0])
    }
    found = roots(waits_for)
    if found.in_cycle:
        assert is_closed(set(found.ranks), waits_for)
        assert len(found.ranks) == smallest_cycle(waits_for, world)
    elif waits_for:
        assert found.ranks
        assert not any(waits_for.get(rank) for rank in found.ranks)
        assert all(any(rank in peers for peers in waits_for.values()) for rank in found.ranks)


def test_the_twin_that_names_whom_the_first_waits_for_is_wrong() -> None:
    chain = {0: [1], 1: [2], 2: [3]}
    assert tuple(chain[0]) != roots(chain).ranks == (3,)

"""The graph of masks: neighbors of every device, and how many shares give a secret back."""

from __future__ import annotations

from math import ceil

import pytest

from gossamer.federated.secure_aggregation.agreement import mask_graph, shares_needed


@pytest.mark.parametrize(("members", "neighbors"), [(5, None), (5, 2), (6, 3), (40, 8), (41, 7), (9, 20)])
def test_neighbors_are_mutual_and_as_many_as_asked(members: int, neighbors: int | None) -> None:
    numbers = [3 * member + 1 for member in range(members)]
    graph = mask_graph(numbers, neighbors, key=7)
    assert graph == mask_graph(numbers, neighbors, key=7)
    due = members - 1 if neighbors is None else min(neighbors + neighbors % 2, members - 1)
    for each, around in graph.items():
        assert len(set(around)) == len(around) == due
        assert list(around) == sorted(around)
        assert all(each in graph[other] and other != each for other in around)
    reached = {numbers[0]}
    for _ in numbers:
        reached |= {other for each in reached for other in graph[each]}
    assert reached == set(numbers)


def test_the_order_is_another_in_another_round() -> None:
    assert mask_graph(range(40), 4, key=1) != mask_graph(range(40), 4, key=2)


@pytest.mark.parametrize("threshold", [0.500001, 0.51, 0.6, 2 / 3, 1.0])
def test_two_groups_apart_never_hold_enough_for_both_secrets(threshold: float) -> None:
    for holders in range(2, 300):
        needed = shares_needed(threshold, holders)
        assert 2 * needed > holders
        assert needed <= holders
    assert shares_needed(0.5 + 1e-10, 4) == 3  # half is not enough, however a threshold is rounded
    assert 2 * ceil((0.5 + 1e-10) * 4 - 1e-9) <= 4  # the twin

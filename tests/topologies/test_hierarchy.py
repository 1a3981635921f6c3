from math import cos, pi

import pytest

from gossamer.topologies import Complete, Hierarchy, Ring

NODES_OF_THREE = {
    3: [(1, 2), (0, 2), (0, 1)],
    4: [(1, 2, 3), (0, 2), (0, 1), (0,)],
    6: [(1, 2, 3), (0, 2, 4), (0, 1, 5), (0, 4, 5), (1, 3, 5), (2, 3, 4)],
    8: [(1, 2, 3, 6), (0, 2, 4, 7), (0, 1, 5), (0, 4, 5, 6), (1, 3, 5, 7), (2, 3, 4), (0, 3, 7), (1, 4, 6)],
}


@pytest.mark.parametrize("world", NODES_OF_THREE)
def test_all_of_a_node_and_the_same_place_in_those_beside_it(world):
    assert [Hierarchy(per_node=3).tells(rank, world, 0) for rank in range(world)] == NODES_OF_THREE[world]


def test_four_nodes_are_a_ring_in_every_place():
    assert Hierarchy(per_node=4).tells(5, 16, 0) == (1, 4, 6, 7, 9)
    assert Hierarchy(per_node=4).tells(0, 16, 0) == (1, 2, 3, 4, 12)
    assert Hierarchy(per_node=4).tells(15, 16, 0) == (3, 11, 12, 13, 14)


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_one_node_is_complete(world):
    for rank in range(world):
        assert Hierarchy().peers(rank, world) == Complete().peers(rank, world)
    assert Hierarchy().second_eigenvalue(world) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_nodes_of_one_are_a_ring(world):
    for rank in range(world):
        assert Hierarchy(per_node=1).peers(rank, world) == Ring().peers(rank, world)


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 4), (1, 9), (2, 4), (2, 7), (4, 5), (8, 4), (8, 6)])
def test_the_second_eigenvalue_is_known(per_node, nodes):
    wanted = 1 - 2 * (1 - cos(2 * pi / nodes)) / (per_node + 2)
    assert Hierarchy(per_node=per_node).second_eigenvalue(per_node * nodes) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("per_node", [0, -1])
def test_a_node_has_somebody_in_it(per_node):
    with pytest.raises(ValueError, match="per_node is a number of workers, 1 or more"):
        Hierarchy(per_node=per_node)

import pytest
from support.collective_tables import rounds_of, tables_of

from gossamer.algorithms.collectives import Does, HierarchicalAllReduce, Hop

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP


def test_two_nodes_of_two():
    assert HierarchicalAllReduce(per_node=2).hops(1, 4) == (
        *(Hop(0, SEND, 0, 0, 2), Hop(0, ADD, 0, 2, 4)),
        *(Hop(1, SEND, 3, 3, 4), Hop(1, ADD, 3, 2, 3)),
        *(Hop(2, SEND, 3, 2, 3), Hop(2, KEEP, 3, 3, 4)),
        *(Hop(3, SEND, 0, 2, 4), Hop(3, KEEP, 0, 0, 2)),
    )


def test_one_rank_holds_both_parts_of_a_smaller_node():
    assert HierarchicalAllReduce(per_node=2).hops(2, 3) == (
        *(Hop(1, SEND, 0, 0, 1), Hop(1, SEND, 1, 2, 3), Hop(1, ADD, 0, 1, 2), Hop(1, ADD, 1, 3, 4)),
        *(Hop(2, SEND, 0, 1, 2), Hop(2, SEND, 1, 3, 4), Hop(2, KEEP, 0, 0, 1), Hop(2, KEEP, 1, 2, 3)),
    )


def test_one_node_is_direct_and_nodes_of_one_too():
    assert HierarchicalAllReduce(per_node=8).hops(0, 1) == ()
    assert HierarchicalAllReduce(per_node=8).hops(0, 2) == (
        *(Hop(0, SEND, 1, 1, 2), Hop(0, ADD, 1, 0, 1)),
        *(Hop(3, SEND, 1, 0, 1), Hop(3, KEEP, 1, 1, 2)),
    )
    assert HierarchicalAllReduce(per_node=1).hops(0, 2) == (
        *(Hop(1, SEND, 1, 1, 2), Hop(1, ADD, 1, 0, 1)),
        *(Hop(2, SEND, 1, 0, 1), Hop(2, KEEP, 1, 1, 2)),
    )


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (5, 2), (7, 3), (8, 3), (9, 4), (16, 4)])
def test_four_rounds_of_which_two_stay_inside(world, per_node):
    tables = tables_of(HierarchicalAllReduce(per_node=per_node), world)
    assert rounds_of(tables) == [0, 1, 2, 3]
    for rank, table in enumerate(tables):
        assert all((hop.peer // per_node == rank // per_node) == (hop.round in (0, 3)) for hop in table)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (6, 2), (6, 3), (8, 4), (9, 3), (16, 4), (4, 1), (4, 8)])
def test_bytes_of_full_nodes(world, per_node):
    size = min(per_node, world)
    nodes, numel = world // size, 840 * 16 * 3
    for rank in range(world):
        inside = 2 * numel * (size - 1) // size
        between = 2 * numel * (nodes - 1) // (nodes * size)
        assert HierarchicalAllReduce(per_node=per_node).bytes_sent(rank, world, numel, 4) == 4 * (inside + between)


@pytest.mark.parametrize(("world", "per_node"), [(3, 2), (5, 2), (7, 3), (8, 3), (5, 4), (9, 4), (16, 7)])
def test_every_node_sends_the_others_as_much(world, per_node):
    """2 N (m-1)/m, also a smaller one; N divides into all pieces."""
    collective = HierarchicalAllReduce(per_node=per_node)
    nodes, pieces = -(-world // per_node), collective.pieces(world)
    for node in range(nodes):
        ranks = range(node * per_node, min(world, (node + 1) * per_node))
        hops = [hop for rank in ranks for hop in collective.hops(rank, world) if hop.does is SEND]
        between = sum(hop.stop - hop.first for hop in hops if hop.round in (1, 2))
        assert between * nodes == 2 * pieces * (nodes - 1)


def test_nodes_have_ranks():
    with pytest.raises(ValueError, match="per_node must be a number of workers, 1 or more, got 0"):
        HierarchicalAllReduce(per_node=0)

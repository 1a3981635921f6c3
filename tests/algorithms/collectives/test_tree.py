import pytest
from support.collective_tables import rounds_of, tables_of

from gossamer.algorithms.collectives import Does, Hop, TreeAllReduce

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP


def test_small_trees():
    assert TreeAllReduce().hops(0, 1) == ()
    assert tables_of(TreeAllReduce(), 2) == [
        (Hop(0, ADD, 1, 0, 1), Hop(1, SEND, 1, 0, 1)),
        (Hop(0, SEND, 0, 0, 1), Hop(1, KEEP, 0, 0, 1)),
    ]
    assert TreeAllReduce().hops(0, 3) == (
        *(Hop(0, ADD, 1, 0, 1), Hop(0, ADD, 2, 0, 1)),
        *(Hop(1, SEND, 1, 0, 1), Hop(1, SEND, 2, 0, 1)),
    )
    assert tables_of(TreeAllReduce(), 4) == [
        (Hop(1, ADD, 1, 0, 1), Hop(1, ADD, 2, 0, 1), Hop(2, SEND, 1, 0, 1), Hop(2, SEND, 2, 0, 1)),
        (Hop(0, ADD, 3, 0, 1), Hop(1, SEND, 0, 0, 1), Hop(2, KEEP, 0, 0, 1), Hop(3, SEND, 3, 0, 1)),
        (Hop(1, SEND, 0, 0, 1), Hop(2, KEEP, 0, 0, 1)),
        (Hop(0, SEND, 1, 0, 1), Hop(3, KEEP, 1, 0, 1)),
    ]


@pytest.mark.parametrize(("world", "depth"), [(2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (9, 3), (16, 4)])
def test_as_many_rounds_as_the_tree_is_deep_twice(world, depth):
    assert rounds_of(tables_of(TreeAllReduce(), world)) == list(range(2 * depth))


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_bytes_are_one_for_the_parent_and_one_for_each_child(world, numel):
    for rank in range(world):
        children = sum(child < world for child in (2 * rank + 1, 2 * rank + 2))
        assert TreeAllReduce().bytes_sent(rank, world, numel, 4) == 4 * numel * ((rank > 0) + children)


def test_leaves_send_least():
    assert [TreeAllReduce().bytes_sent(rank, 7, 1, 4) for rank in range(7)] == [8, 12, 12, 4, 4, 4, 4]

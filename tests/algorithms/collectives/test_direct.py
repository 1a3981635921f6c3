import pytest
from support.collective_tables import rounds_of, tables_of

from gossamer.algorithms.collectives import DirectAllReduce, Does, Hop

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP


def test_small_worlds():
    assert DirectAllReduce().hops(0, 1) == ()
    assert DirectAllReduce().hops(0, 2) == (
        *(Hop(0, SEND, 1, 1, 2), Hop(0, ADD, 1, 0, 1)),
        *(Hop(1, SEND, 1, 0, 1), Hop(1, KEEP, 1, 1, 2)),
    )
    assert DirectAllReduce().hops(1, 3) == (
        *(Hop(0, SEND, 2, 2, 3), Hop(0, SEND, 0, 0, 1), Hop(0, ADD, 0, 1, 2), Hop(0, ADD, 2, 1, 2)),
        *(Hop(1, SEND, 2, 1, 2), Hop(1, SEND, 0, 1, 2), Hop(1, KEEP, 0, 0, 1), Hop(1, KEEP, 2, 2, 3)),
    )


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 9, 16])
def test_two_rounds_regardless_of_the_world(world):
    tables = tables_of(DirectAllReduce(), world)
    assert rounds_of(tables) == [0, 1]
    for rank, table in enumerate(tables):
        assert len(table) == 4 * (world - 1)
        assert {hop.first for hop in table if hop.does is ADD} == {rank}
        assert table[0].peer == (rank + 1) % world  # not everyone begins with the same one


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("numel", [0, 1, 6, 7, 1000])
def test_bytes_are_everything_but_the_own_piece_and_that_to_the_others(world, numel):
    for rank in range(world):
        own = numel // world + (rank < numel % world)
        assert DirectAllReduce().bytes_sent(rank, world, numel, 4) == 4 * (numel - own + (world - 1) * own)
        assert DirectAllReduce().bytes_sent(rank, world, 840, 4) == 2 * 840 * 4 * (world - 1) // world

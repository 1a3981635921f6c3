import pytest
from support.collective_tables import check_table, rounds_of, tables_of

from gossamer.algorithms.collectives import Does, Hop, RingAllReduce

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP


def test_small_rings():
    assert RingAllReduce().hops(0, 1) == ()
    assert tables_of(RingAllReduce(), 2) == [
        (Hop(0, SEND, 1, 1, 2), Hop(0, ADD, 1, 0, 1), Hop(1, SEND, 1, 0, 1), Hop(1, KEEP, 1, 1, 2)),
        (Hop(0, SEND, 0, 0, 1), Hop(0, ADD, 0, 1, 2), Hop(1, SEND, 0, 1, 2), Hop(1, KEEP, 0, 0, 1)),
    ]
    assert RingAllReduce().hops(1, 3) == (
        *(Hop(0, SEND, 2, 0, 1), Hop(0, ADD, 0, 2, 3), Hop(1, SEND, 2, 2, 3), Hop(1, ADD, 0, 1, 2)),
        *(Hop(2, SEND, 2, 1, 2), Hop(2, KEEP, 0, 0, 1), Hop(3, SEND, 2, 0, 1), Hop(3, KEEP, 0, 2, 3)),
    )
    assert [hop.first for hop in RingAllReduce().hops(3, 4) if hop.does is SEND] == [2, 1, 0, 3, 2, 1]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 9, 16])
def test_everyone_sends_to_the_next_in_as_many_rounds_as_there_are_others_twice(world):
    tables = tables_of(RingAllReduce(), world)
    assert rounds_of(tables) == list(range(2 * (world - 1)))
    for rank, table in enumerate(tables):
        assert [hop.does for hop in table] == [SEND, ADD] * (world - 1) + [SEND, KEEP] * (world - 1)
        assert {hop.peer for hop in table if hop.does is SEND} == {(rank + 1) % world}
        assert {hop.peer for hop in table if hop.does is not SEND} == {(rank - 1) % world}


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("numel", [0, 1, 6, 7, 1000])
def test_bytes_are_everything_twice_but_two_pieces(world, numel):
    pieces = [numel // world + (rank < numel % world) for rank in range(world)]
    for rank in range(world):
        assert RingAllReduce().bytes_sent(rank, world, numel, 4) == 4 * (
            2 * numel - pieces[rank] - pieces[(rank + 1) % world]
        )
        assert RingAllReduce().bytes_sent(rank, world, 840, 4) == 2 * 840 * 4 * (world - 1) // world


def test_a_ring_can_be_laid_elsewhere():
    order = (0, 2, 1, 3)
    ring = RingAllReduce(order=order)
    assert [ring.hops(rank, 4)[0].peer for rank in order] == [2, 1, 3, 0]
    check_table(tables_of(ring, 4), 4)
    assert tables_of(RingAllReduce(order=(0, 1, 2, 3)), 4) == tables_of(RingAllReduce(), 4)
    moved = RingAllReduce(
        order=(3, 0, 1, 2)
    )  # the same ring, from another place on: pieces are named after their owners
    assert tables_of(moved, 4) == tables_of(RingAllReduce(), 4)


def test_owners_are_the_ranks_of_their_pieces():
    for ring in (RingAllReduce(), RingAllReduce(order=(0, 3, 1, 2))):
        for rank, table in enumerate(tables_of(ring, 4)):
            kept = {hop.first for hop in table if hop.does is KEEP}
            assert kept == {0, 1, 2, 3} - {rank}


def test_a_ring_visits_every_rank_once():
    with pytest.raises(ValueError, match="each of the ranks 0 to n - 1 once"):
        RingAllReduce(order=(0, 1, 1))
    with pytest.raises(ValueError, match="order has 2 ranks, and there are 3"):
        RingAllReduce(order=(1, 0)).hops(0, 3)

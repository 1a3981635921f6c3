import pytest
from support.collective_tables import rounds_of, tables_of

from gossamer.algorithms.collectives import Does, HalvingDoubling, Hop

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP


def table(rank, world):
    return HalvingDoubling().hops(rank, world)


def test_small_worlds():
    assert table(0, 1) == ()
    assert table(0, 2) == (
        *(Hop(0, SEND, 1, 1, 2), Hop(0, ADD, 1, 0, 1)),
        *(Hop(1, SEND, 1, 0, 1), Hop(1, KEEP, 1, 1, 2)),
    )
    assert table(2, 4) == (
        *(Hop(0, SEND, 3, 2, 4), Hop(0, ADD, 3, 0, 2), Hop(1, SEND, 0, 0, 1), Hop(1, ADD, 0, 1, 2)),
        *(Hop(2, SEND, 0, 1, 2), Hop(2, KEEP, 0, 0, 1), Hop(3, SEND, 3, 0, 2), Hop(3, KEEP, 3, 2, 4)),
    )


def test_one_of_three_stands_aside():
    assert tables_of(HalvingDoubling(), 3) == [
        (
            *(Hop(0, ADD, 1, 0, 2), Hop(1, SEND, 2, 1, 2), Hop(1, ADD, 2, 0, 1)),
            *(Hop(2, SEND, 2, 0, 1), Hop(2, KEEP, 2, 1, 2), Hop(3, SEND, 1, 0, 2)),
        ),
        (Hop(0, SEND, 0, 0, 2), Hop(3, KEEP, 0, 0, 2)),
        (
            *(Hop(1, SEND, 0, 0, 1), Hop(1, ADD, 0, 1, 2)),
            *(Hop(2, SEND, 0, 1, 2), Hop(2, KEEP, 0, 0, 1)),
        ),
    ]


@pytest.mark.parametrize(("world", "rounds"), [(2, 2), (3, 4), (4, 4), (5, 6), (6, 6), (7, 6), (8, 6), (9, 8), (16, 8)])
def test_rounds_are_logarithmic(world, rounds):
    assert rounds_of(tables_of(HalvingDoubling(), world)) == list(range(rounds))


def test_the_most_travels_between_neighbours():
    sends = [(hop.peer, hop.stop - hop.first) for hop in table(0, 16) if hop.does is SEND]
    assert sends == [(1, 8), (2, 4), (4, 2), (8, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize(
    ("world", "members"), [(2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 4), (8, 8), (9, 8), (16, 16)]
)
def test_bytes_are_a_rings_and_those_of_who_is_stood_in_for(world, members):
    numel, surplus = 840 * 16, world - members
    for rank in range(world):
        sent = HalvingDoubling().bytes_sent(rank, world, numel, 4)
        aside, folds = rank < 2 * surplus and rank % 2 == 1, rank < 2 * surplus
        assert sent == 4 * (numel if aside else 2 * numel * (members - 1) // members + folds * numel)

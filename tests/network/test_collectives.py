from collections import Counter

import pytest

from gossamer.network.collectives import (
    SEGMENT_BYTES,
    Receive,
    Received,
    Send,
    Sent,
    direct,
    neighbours,
    ring_mean,
    tree_broadcast,
)


def sends(moves):
    return [(move.to, move.nbytes) for move in moves if isinstance(move, Send)]


def test_two_ranks_average_in_two_segments_each_way():
    assert list(ring_mean(0, 2, 64)) == [
        *(Receive(1), Send(1, 16), Receive(1), Send(1, 16), Received(), Sent(), Received(), Sent()),
        *(Receive(1), Send(1, 16), Receive(1), Send(1, 16), Received(), Sent(), Received(), Sent()),
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("nbytes", [4, 40, 4000, 13 * 10**6])
def test_a_ring_mean_sends_everything_twice_but_its_own_part(world, nbytes):
    every = [sends(ring_mean(rank, world, nbytes)) for rank in range(world)]
    assert sum(size for each in every for _, size in each) == 2 * (world - 1) * nbytes
    assert {to for to, _ in every[0]} == {world - 1}
    assert all(0 < size <= SEGMENT_BYTES for each in every for _, size in each)


def test_a_large_mean_travels_in_segments_of_equal_size():
    assert Counter(sends(ring_mean(0, 4, 13 * 10**6))) == {(3, 812_500): 24}


def test_a_mean_of_one_element_skips_empty_segments():
    assert sum(len(sends(ring_mean(rank, 4, 4))) for rank in range(4)) == 6


def test_what_is_direct_goes_everywhere_at_once():
    assert list(direct(0, 3, [9, 10, 11])) == [
        *(Receive(2), Receive(1), Send(1, 10), Send(2, 11)),
        *(Received(), Sent(), Received(), Sent()),
    ]


def test_neighbours_are_told_once_and_nobody_tells_itself():
    assert list(neighbours(0, [0, 2], [0, 2], 5)) == [Send(2, 5), Receive(2), Received(), Sent()]


def test_a_broadcast_doubles_those_who_know():
    assert [sends(tree_broadcast(rank, 5, 8)) for rank in range(5)] == [
        [(1, 8), (2, 8), (4, 8)],
        [(3, 8)],
        [],
        [],
        [],
    ]
    assert sends(tree_broadcast(3, 5, 8, source=3)) == [(4, 8), (0, 8), (2, 8)]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_every_message_that_is_sent_is_received(world):
    for make in (
        lambda rank: ring_mean(rank, world, 1234),
        lambda rank: direct(rank, world, [8] * world),
        lambda rank: tree_broadcast(rank, world, 8, source=1),
    ):
        moves = {rank: list(make(rank)) for rank in range(world)}
        sent = Counter((rank, move.to) for rank in moves for move in moves[rank] if isinstance(move, Send))
        heard = Counter((move.of, rank) for rank in moves for move in moves[rank] if isinstance(move, Receive))
        assert sent == heard
        for each in moves.values():
            kinds = Counter(type(move) for move in each)
            assert (kinds[Send], kinds[Receive]) == (kinds[Sent], kinds[Received])

from collections import Counter

import pytest

from gossamer.algorithms.collectives import (
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.comm.network.cost import message_schedule
from gossamer.comm.network.cost.message_schedule import (
    CHUNK_BYTES,
    MOST_MESSAGES,
    SEGMENT_BYTES,
    Collect,
    RankTurn,
    Receive,
    ReceiveCompleted,
    Send,
    SendCompleted,
    direct,
    eager_direct,
    eager_neighbors,
    neighbors,
    ring_mean,
    table_moves,
    tree_broadcast,
)

COLLECTIVES = [
    RingAllReduce(),
    HalvingDoubling(),
    TreeAllReduce(),
    DirectAllReduce(),
    HierarchicalAllReduce(per_node=2),
    HierarchicalAllReduce(per_node=3),
]


def sends(moves):
    return [(move.to, move.nbytes) for move in moves if isinstance(move, Send)]


def test_two_ranks_average_in_two_segments_each_way():
    assert list(ring_mean(0, 2, 64)) == [
        *(
            Receive(1),
            Send(1, 16),
            Receive(1),
            Send(1, 16),
            ReceiveCompleted(),
            SendCompleted(),
            ReceiveCompleted(),
            SendCompleted(),
        ),
        *(
            Receive(1),
            Send(1, 16),
            Receive(1),
            Send(1, 16),
            ReceiveCompleted(),
            SendCompleted(),
            ReceiveCompleted(),
            SendCompleted(),
        ),
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
        *(ReceiveCompleted(), SendCompleted(), ReceiveCompleted(), SendCompleted()),
    ]


def test_neighbours_are_told_once_and_nobody_tells_itself():
    assert list(neighbors(0, [0, 2], [0, 2], 5)) == [Send(2, 5), Receive(2), ReceiveCompleted(), SendCompleted()]


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
            assert (kinds[Send], kinds[Receive]) == (kinds[SendCompleted], kinds[ReceiveCompleted])


def test_what_is_eager_is_not_asked_for():
    assert list(eager_direct(0, 3, [9, 10, 11])) == [
        Send(1, 10, eager=True),
        Send(2, 11, eager=True),
        Collect(1),
        Collect(2),
    ]
    assert list(eager_neighbors(0, [0, 2], [0, 1], 5)) == [Send(2, 5, eager=True), Collect(1)]


def told(nbytes, to=1):
    return Send(to, nbytes, eager=True)


def test_every_piece_of_a_table_is_an_exchange():
    assert [list(moves) for moves in table_moves(DirectAllReduce(), 0, 2, 3, 4)] == [
        [
            RankTurn(2),
            Collect(1),
            told(8),
        ],  # its own piece, of two elements, which it sends when it has heard the other's
        [RankTurn(1), told(4), Collect(1)],
    ]
    assert [list(moves) for moves in table_moves(DirectAllReduce(), 0, 2, 1, 4)] == [[RankTurn(2), Collect(1), told(4)]]
    assert table_moves(DirectAllReduce(), 0, 2, 0, 4) == []
    assert table_moves(DirectAllReduce(), 0, 1, 5, 4) != []
    assert [list(moves) for moves in table_moves(TreeAllReduce(), 0, 3, 1, 4)] == [
        [RankTurn(1), Collect(1), Collect(2), told(4), told(4, to=2)],
    ]


def test_pieces_travel_in_chunks_of_equal_size_and_all_begin_before_the_second():
    numel = 2 * 3 * CHUNK_BYTES // 4
    moves = [list(each) for each in table_moves(DirectAllReduce(), 0, 2, numel, 4)]
    assert [each[0] for each in moves] == [RankTurn(2), RankTurn(1), RankTurn(4), RankTurn(3), RankTurn(6), RankTurn(5)]
    assert {send for each in moves for send in sends(each)} == {(1, CHUNK_BYTES)}
    tree = [sends(each) for each in table_moves(TreeAllReduce(), 1, 2, CHUNK_BYTES // 4 + 1, 4)]
    assert tree == [[(0, CHUNK_BYTES // 2 + 4)], [(0, CHUNK_BYTES // 2)]]


def check_moves(collective, world, numel, moves_of):
    """Exchanges are the same ones on all ranks, whoever is sent to hears it, and bytes are the table's."""
    every = [[list(moves) for moves in moves_of(collective, rank, world, numel, 4)] for rank in range(world)]
    assert len({len(exchanges) for exchanges in every}) == 1
    for rank, exchanges in enumerate(every):
        sent = sum(nbytes for moves in exchanges for _, nbytes in sends(moves))
        assert sent == collective.bytes_sent(rank, world, numel, 4)
        for place, moves in enumerate(exchanges):
            heard = Counter(move.of for move in moves if isinstance(move, Collect))
            assert heard == {
                peer: told for peer in range(world) if (told := sum(to == rank for to, _ in sends(every[peer][place])))
            }


@pytest.mark.parametrize("collective", COLLECTIVES, ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 5, 1000, 3_000_001])
def test_moves_carry_what_the_table_says(collective, numel):
    for world in (1, 2, 3, 5, 8):
        check_moves(collective, world, numel, table_moves)


def rotated(collective, rank, world, numel, itemsize):
    """Broken: pieces are other exchanges on every rank."""
    exchanges = table_moves(collective, rank, world, numel, itemsize)
    return exchanges[rank:] + exchanges[:rank]


def without_its_first(collective, rank, world, numel, itemsize):
    return table_moves(collective, rank, world, numel, itemsize)[1:]


@pytest.mark.parametrize("broken", [rotated, without_its_first])
@pytest.mark.parametrize("collective", [RingAllReduce(), HalvingDoubling(), DirectAllReduce()], ids=repr)
def test_other_moves_are_seen(collective, broken):
    with pytest.raises(AssertionError):
        check_moves(collective, 4, 1000, broken)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=repr)
def test_a_price_is_that_of_so_many_messages_at_most(collective):
    for world in (2, 3, 8):
        every = [table_moves(collective, rank, world, 10**8, 4) for rank in range(world)]
        count = sum(len(sends(moves)) for exchanges in every for moves in exchanges)
        assert MOST_MESSAGES / 2 < count <= MOST_MESSAGES


def test_an_exchange_has_a_message_at_least(monkeypatch):
    monkeypatch.setattr(message_schedule, "MOST_MESSAGES", 1)
    assert len(table_moves(DirectAllReduce(), 0, 4, 10**8, 4)) == 4

import pytest
import torch
from support.collective_tables import check_form, check_partners, rounds_of, run, tables_of

from gossamer.algorithms.collectives import Broadcast, Does, Hop

SEND, KEEP = Does.SEND, Does.KEEP
WORLDS = [2, 3, 4, 5, 7, 8, 9, 16]


def test_small_worlds():
    assert Broadcast().hops(0, 1) == ()
    assert Broadcast().hops(0, 2) == (Hop(0, SEND, 1, 0, 1),)
    assert Broadcast().hops(1, 2) == (Hop(0, KEEP, 0, 0, 1),)
    assert Broadcast(source=1).hops(1, 3) == (Hop(0, SEND, 2, 0, 1), Hop(0, SEND, 0, 1, 2))
    assert Broadcast(source=1).hops(2, 3) == (Hop(0, KEEP, 1, 0, 1), Hop(1, SEND, 0, 0, 1), Hop(1, KEEP, 0, 1, 2))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("source", [0, 1, -1])
def test_everyone_ends_with_what_the_source_had(world, source):
    table = Broadcast(source=source % world)
    tables, pieces = tables_of(table, world), table.pieces(world)
    check_form(tables, pieces)
    check_partners(tables)
    assert rounds_of(tables) == ([0, 1] if world > 2 else [0])
    hold = [[(rank, piece) for piece in range(pieces)] for rank in range(world)]
    assert run(tables, pieces, hold, None) == [[(source % world, piece) for piece in range(pieces)]] * world


@pytest.mark.parametrize("world", WORLDS[1:])
def test_whoever_forgets_to_pass_a_piece_on_is_found(world):
    tables = tables_of(Broadcast(), world)
    tables[1] = tables[1][:1] + tables[1][2:]
    with pytest.raises(AssertionError):
        check_partners(tables)


@pytest.mark.parametrize("world", WORLDS)
def test_the_source_sends_it_once_and_the_others_what_is_left(world):
    sent = [Broadcast().bytes_sent(rank, world, 720 * (world - 1), 4) for rank in range(world)]
    assert sent[0] == 4 * 720 * (world - 1)
    assert sent[1:] == [4 * 720 * (world - 2)] * (world - 1)
    assert sum(sent) == (world - 1) * sent[0]
    assert torch.tensor(sent).max() == sent[0]

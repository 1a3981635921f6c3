"""Laws of every collective's table, and tables that break them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.collective_tables import check_partners, check_same_bytes, check_sums, check_table, summed, tables_of

from gossamer.algorithms import collectives
from gossamer.algorithms.collectives import (
    COLLECTIVES,
    Collective,
    DirectAllReduce,
    Does,
    HalvingDoubling,
    HierarchicalAllReduce,
    HubAllReduce,
    RingAllReduce,
    TreeAllReduce,
    bounds,
    others,
)

WORLDS = (*range(1, 10), 16)
EVERY = [
    RingAllReduce(),
    HalvingDoubling(),
    TreeAllReduce(),
    DirectAllReduce(),
    *(HierarchicalAllReduce(per_node=per_node) for per_node in (1, 2, 3, 4, 8)),
    *(HubAllReduce(hub=hub) for hub in (0, 2)),
]


@pytest.mark.parametrize("collective", EVERY, ids=repr)
def test_tables_are_sound(collective):
    for world in WORLDS:
        check_table(tables_of(collective, world), collective.pieces(world))


@pytest.mark.parametrize("collective", EVERY, ids=repr)
def test_sums_are_exact_and_the_same_everywhere(collective):
    for world in WORLDS:
        tables, pieces = tables_of(collective, world), collective.pieces(world)
        for numel in sorted({0, 1, world - 1, world, world + 1, 1000}):
            check_sums(tables, pieces, numel)
        check_same_bytes(tables, pieces)


@pytest.mark.parametrize("collective", [RingAllReduce(), DirectAllReduce(), HalvingDoubling(), *EVERY[4:]], ids=repr)
def test_all_together_send_everything_twice_but_once(collective):
    """2 N (n-1) bytes: every rank but the owner sends its numbers to a sum once, and hears it once."""
    for world in WORLDS:
        for numel in (0, 1, world - 1, world + 1, 1000):
            sent = sum(collective.bytes_sent(rank, world, numel, 4) for rank in range(world))
            assert sent == 2 * (world - 1) * 4 * numel


@pytest.mark.parametrize("collective", EVERY, ids=repr)
def test_alone_there_is_nothing_to_do(collective):
    assert collective.hops(0, 1) == ()
    assert collective.bytes_sent(0, 1, 1000, 4) == 0


@pytest.mark.parametrize("collective", EVERY, ids=repr)
def test_only_ranks_of_the_world_have_tables(collective):
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"0 to 3 .* got {rank}"):
            collective.hops(rank, 4)


def dropped(table, place):
    return table[:place] + table[place + 1 :]


def added_instead(table, place):
    return table[:place] + (replace(table[place], does=Does.ADD),) + table[place + 1 :]


def kept_instead(table, place):
    return table[:place] + (replace(table[place], does=Does.KEEP),) + table[place + 1 :]


def from_another(table, place, world=4):
    wrong = replace(table[place], peer=(table[place].peer + 1) % world)
    return table[:place] + (wrong,) + table[place + 1 :]


def broken(tables, breaks, does):
    """Every table in turn, with one of its hops of a kind broken."""
    for rank, table in enumerate(tables):
        for place, hop in enumerate(table):
            if hop.does in does:
                yield [*tables[:rank], breaks(table, place), *tables[rank + 1 :]]


@pytest.mark.parametrize(
    ("breaks", "does"),
    [
        (dropped, {*Does}),
        (added_instead, {Does.KEEP}),
        (kept_instead, {Does.ADD}),
        (from_another, {*Does}),
    ],
)
@pytest.mark.parametrize("collective", EVERY[:6], ids=repr)
def test_any_broken_hop_is_seen(collective, breaks, does):
    for tables in broken(tables_of(collective, 4), breaks, does):
        with pytest.raises((AssertionError, KeyError)):
            check_table(tables, collective.pieces(4))


@pytest.mark.parametrize(("breaks", "does"), [(added_instead, {Does.KEEP}), (kept_instead, {Does.ADD})])
@pytest.mark.parametrize("collective", EVERY[:6], ids=repr)
def test_sums_tell_what_adds_from_what_keeps(collective, breaks, does):
    for tables in broken(tables_of(collective, 4), breaks, does):
        check_partners(tables)
        with pytest.raises(AssertionError):
            check_sums(tables, collective.pieces(4), 1000)


class Everyone(Collective):
    """The broken twin of owners: everybody adds up everything itself, in its own order."""

    name = "everyone"

    def pieces(self, world):
        return 1

    def _hops(self, rank, world):
        hop = collectives.Hop
        yield from (hop(0, Does.SEND, peer, 0, 1) for peer in others(rank, world))
        yield from (hop(0, Does.ADD, peer, 0, 1) for peer in others(rank, world))


def test_sums_without_an_owner_differ():
    tables = tables_of(Everyone(), 5)
    with pytest.raises(AssertionError):
        check_same_bytes(tables, 1)
    with pytest.raises(AssertionError):
        check_table(tables, 1)


class Late(DirectAllReduce):
    """A broken twin: owners tell before they have heard."""

    def _hops(self, rank, world):
        return (replace(hop, round=0) for hop in super()._hops(rank, world))


def test_sums_are_not_told_before_they_are_complete():
    with pytest.raises(AssertionError):
        check_table(tables_of(Late(), 3), 3)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("numel", [0, 1, 6, 7, 8, 1000])
def test_bounds_are_where_tensor_split_cuts(numel, pieces):
    at = bounds(numel, pieces)
    assert [stop - first for first, stop in pairwise(at)] == [
        len(part) for part in torch.zeros(numel).tensor_split(pieces)
    ]


def test_others_begin_after_oneself():
    assert [others(rank, 4) for rank in range(4)] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert others(0, 1) == []


def test_collectives_have_names():
    made = [COLLECTIVES[name]() for name in ("ring", "halving", "tree", "direct")]
    assert made == [RingAllReduce(), HalvingDoubling(), TreeAllReduce(), DirectAllReduce()]
    assert COLLECTIVES["hierarchical"](per_node=2) == HierarchicalAllReduce(per_node=2)
    assert {name: each.name for name, each in COLLECTIVES.items()} == {name: name for name in COLLECTIVES}
    assert len({*EVERY}) == len(EVERY)


def test_what_several_add_goes_by_the_table():
    """8 is lost beside 2**27 in float32, unless it is added last."""
    table = tables_of(DirectAllReduce(), 3)
    tensors = [torch.tensor([big, 0.0, 0.0]) for big in (2.0**27, 8.0, -(2.0**27))]
    assert summed(table, 3, tensors)[0].tolist() == [0.0, 0.0, 0.0]
    assert [hop.peer for hop in table[0] if hop.does is Does.ADD] == [1, 2]
    assert [hop.peer for hop in table[1] if hop.does is Does.ADD] == [0, 2]

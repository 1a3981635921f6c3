"""Native mesh: collectives over connected sockets, in one process: a thread for each rank."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from support.mesh_group import MESSAGE, Group, SealedGroup, payload, same, whole_numbers
from support.nightly import once_each

from gossamer.algorithms.collectives import (
    DirectAllReduce,
    Does,
    HalvingDoubling,
    HierarchicalAllReduce,
    HubAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.base.kernels.library import are_built
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced, NeighborAllGather

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


COLLECTIVES = [
    DirectAllReduce(),
    RingAllReduce(),
    HalvingDoubling(),
    TreeAllReduce(),
    HierarchicalAllReduce(per_node=2),
    HierarchicalAllReduce(per_node=3),
    HubAllReduce(hub=1),
]
either = pytest.mark.parametrize("kind", [Group, SealedGroup])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
@once_each("collective, kind", COLLECTIVES, [Group, SealedGroup])
def test_every_table_gives_the_mean_to_the_bit_and_the_same_bytes_to_all(world, collective, kind):
    with kind(world, collective) as group:
        for numel in (0, 1, world - 1, world + 1, 1000, 3 * MESSAGE // 4 + 5):
            given = whole_numbers(world, numel)
            heard = group.answers([AllReduceMean(each) for each in given])
            assert all(torch.equal(each, sum(given) / world) for each in heard)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("collective", [RingAllReduce(), DirectAllReduce()], ids=repr)
@either
def test_other_formats_are_rounded_once(collective, dtype, kind):
    with kind(3, collective) as group:
        given = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
        expected = answer_all([AllReduceMean(each) for each in given])
        heard = group.answers([AllReduceMean(each) for each in given])
        if dtype.itemsize < 4:
            assert all(torch.equal(each, expected[0]) for each in heard)
        else:
            assert all(torch.allclose(each, expected[0], rtol=0, atol=1e-15) for each in heard)
            assert all(torch.equal(each, heard[0]) for each in heard)


def test_a_sum_in_half_precision_neither_overflows_nor_hides_what_is_no_number():
    given = [torch.tensor([30000.0, float("nan"), float("inf"), -0.0], dtype=torch.float16) for _ in range(4)]
    with Group(4) as group:
        for heard in group.answers([AllReduceMean(each) for each in given]):
            assert heard[0] == 30000
            assert heard[1].isnan()
            assert heard[2].isposinf()


def test_a_direct_mean_is_summed_by_rank_as_the_simulation_sums_it():
    given = [torch.randn(200_003, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
    with Group(5, DirectAllReduce()) as group:
        heard = group.answers([AllReduceMean(each) for each in given])
    assert all(torch.equal(each, answer_all([AllReduceMean(one) for one in given])[0]) for each in heard)


@either
def test_a_mean_may_be_written_where_it_came_from(kind):
    given = whole_numbers(2, 1000)
    expected = sum(given) / 2
    with kind(2, RingAllReduce()) as group:
        group.answers([AllReduceMean(each, each) for each in given])
    assert all(torch.equal(each, expected) for each in given)


def test_a_mean_may_be_written_between_other_numbers():
    given = whole_numbers(2, 1000)
    rooms = [torch.zeros(2000) for _ in given]
    with Group(2) as group:
        group.answers([AllReduceMean(each, room[::2]) for each, room in zip(given, rooms, strict=True)])
    for room in rooms:
        assert torch.equal(room[::2], sum(given) / 2)
        assert not room[1::2].any()


def mixes(world):
    edges = [tuple((peer % world, 0.5) for peer in sorted((rank - 1, rank, rank + 1))) for rank in range(world)]
    return [NeighborAllGather(payload(rank), edges[rank]) for rank in range(world)]


@either
@pytest.mark.parametrize("world", [2, 4])
def test_gathers_exchanges_and_mixes_answer_as_the_simulation_does(world, kind):
    ops = {
        "gather": [AllGather(payload(rank)) for rank in range(world)],
        "empty": [AllGather((torch.empty(0),)) for rank in range(world)],
        "exchange": [AllToAll(tuple(payload(rank, peer) for peer in range(world))) for rank in range(world)],
        "mix": mixes(world),
    }
    with kind(world) as group:
        for said in ops.values():
            for heard, expected in zip(group.answers(said), answer_all(said), strict=True):
                assert same(heard, expected)


@either
def test_words_at_once_and_words_begun_before_others_ended(kind):
    world = 3
    given = whole_numbers(world, 100_000)
    with kind(world, RingAllReduce()) as group:

        def talk(rank):
            transport = group.transports[rank]
            first = transport.begin(Coalesced((AllReduceMean(given[rank]), AllGather(payload(rank)))))
            second = transport.begin(AllReduceMean(given[rank] + 3))
            third = transport.begin(AllGather((torch.tensor([rank]),)))
            return third(), first(), second()

        for third, (mean, gathered), second in group.all(talk):
            assert [int(each) for (each,) in third] == [0, 1, 2]
            assert torch.equal(mean, sum(given) / world)
            assert same(gathered, [payload(rank) for rank in range(world)])
            assert torch.equal(second, mean + 3)


@either
def test_one_rank_may_be_far_ahead(kind):
    """It says many ops before another says its first; what comes early waits in the sockets."""
    with kind(2) as group:
        gate = threading.Event()

        def talk(rank):
            if rank:
                assert gate.wait(10)
            waits = [
                group.transports[rank].begin(AllReduceMean(torch.full((50_000,), float(rank + n)))) for n in range(40)
            ]
            gate.set()
            return [float(wait()[0]) for wait in waits]

        assert group.all(talk) == [[n + 0.5 for n in range(40)]] * 2


class Forgetful(RingAllReduce):
    """One rank once keeps what it should add."""

    def _hops(self, rank, world):
        for hop in super()._hops(rank, world):
            forgets = rank == 1 and hop.round == 0 and hop.does == Does.ADD
            yield replace(hop, does=Does.KEEP) if forgets else hop


def test_a_table_that_forgets_to_add_is_found_out():
    given = whole_numbers(3, 1000)
    with Group(3, Forgetful()) as group:
        heard = group.answers([AllReduceMean(each) for each in given])
    with pytest.raises(AssertionError):
        assert all(torch.equal(each, sum(given) / 3) for each in heard)

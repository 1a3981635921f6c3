"""Words over connected sockets, in one process: a thread for each rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from gossamer.collectives import Direct, HalvingDoubling, Hierarchical, Hop, Ring, Tree
from gossamer.errors import MismatchError, PeerLost
from gossamer.kernels.native import library
from gossamer.transports.greeting import connect
from gossamer.transports.mesh import Mesh
from gossamer.transports.meshed import MeshTransport, meshed
from gossamer.transports.simulated import SimulatedGroup, answers
from gossamer.words import Exchange, Gather, Mean, Mix, Together

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")

MESSAGE = 2**18  # bytes
COLLECTIVES = [Direct(), Ring(), HalvingDoubling(), Tree(), Hierarchical(per_node=2), Hierarchical(per_node=3)]


class Group:
    """`world` ranks on loopback, each with a thread of its own."""

    def __init__(self, world, collective=None):
        self.world = world
        self.pool = ThreadPoolExecutor(world)
        self.engines = SimulatedGroup(world, patience_seconds=20.0).transports
        self.sockets = self.all(lambda rank: connect(rank, world, "127.0.0.1", self.engines[rank].gather_text))
        self.transports = [
            MeshTransport(engine, Mesh(rank, self.sockets[rank]), lambda *_: collective or Direct(), meshed)
            for rank, engine in enumerate(self.engines)
        ]

    def all(self, act):
        return [ticket.result(30) for ticket in [self.pool.submit(act, rank) for rank in range(self.world)]]

    def answers(self, words):
        return self.all(lambda rank: self.transports[rank].answer(words[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for transport in self.transports:
            transport.close()
        self.pool.shutdown()


def whole_numbers(world, numel, dtype=torch.float32):
    return [torch.arange(numel).mul(rank + 3).remainder(113).mul(world).to(dtype) for rank in range(world)]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=repr)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8])
def test_every_table_gives_the_mean_to_the_bit_and_the_same_bytes_to_all(world, collective):
    with Group(world, collective) as group:
        for numel in (0, 1, world - 1, world + 1, 1000, 3 * MESSAGE // 4 + 5):
            given = whole_numbers(world, numel)
            heard = group.answers([Mean(each) for each in given])
            assert all(torch.equal(each, sum(given) / world) for each in heard)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("collective", [Ring(), Direct()], ids=repr)
def test_other_formats_are_rounded_once(collective, dtype):
    with Group(3, collective) as group:
        given = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
        expected = answers([Mean(each) for each in given])
        heard = group.answers([Mean(each) for each in given])
        if dtype.itemsize < 4:
            assert all(torch.equal(each, expected[0]) for each in heard)
        else:
            assert all(torch.allclose(each, expected[0], rtol=0, atol=1e-15) for each in heard)
            assert all(torch.equal(each, heard[0]) for each in heard)


def test_a_sum_in_half_precision_neither_overflows_nor_hides_what_is_no_number():
    given = [torch.tensor([30000.0, float("nan"), float("inf"), -0.0], dtype=torch.float16) for _ in range(4)]
    with Group(4) as group:
        for heard in group.answers([Mean(each) for each in given]):
            assert heard[0] == 30000
            assert heard[1].isnan()
            assert heard[2].isposinf()


def test_a_direct_mean_is_summed_by_rank_as_the_simulation_sums_it():
    given = [torch.randn(200_003, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
    with Group(5, Direct()) as group:
        heard = group.answers([Mean(each) for each in given])
    assert all(torch.equal(each, answers([Mean(one) for one in given])[0]) for each in heard)


def test_a_mean_may_be_written_where_it_came_from():
    given = whole_numbers(2, 1000)
    expected = sum(given) / 2
    with Group(2, Ring()) as group:
        group.answers([Mean(each, each) for each in given])
    assert all(torch.equal(each, expected) for each in given)


def payload(rank, extra=0):
    return torch.full((3,), rank, dtype=torch.uint8), torch.full((MESSAGE // 8 + extra, 2), 1.5 + rank)


def same(heard, expected):
    return all(
        torch.equal(a, b) for one, other in zip(heard, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def mixes(world):
    edges = [tuple((peer % world, 0.5) for peer in sorted((rank - 1, rank, rank + 1))) for rank in range(world)]
    return [Mix(payload(rank), edges[rank]) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_exchanges_and_mixes_answer_as_the_simulation_does(world):
    words = {
        "gather": [Gather(payload(rank)) for rank in range(world)],
        "empty": [Gather((torch.empty(0),)) for rank in range(world)],
        "exchange": [Exchange(tuple(payload(rank, peer) for peer in range(world))) for rank in range(world)],
        "mix": mixes(world),
    }
    with Group(world) as group:
        for said in words.values():
            for heard, expected in zip(group.answers(said), answers(said), strict=True):
                assert same(heard, expected)


def test_words_at_once_and_words_begun_before_others_ended():
    world = 3
    given = whole_numbers(world, 100_000)
    with Group(world, Ring()) as group:

        def talk(rank):
            transport = group.transports[rank]
            first = transport.begin(Together((Mean(given[rank]), Gather(payload(rank)))))
            second = transport.begin(Mean(given[rank] + 3))
            third = transport.begin(Gather((torch.tensor([rank]),)))
            return third(), first(), second()

        for third, (mean, gathered), second in group.all(talk):
            assert [int(each) for (each,) in third] == [0, 1, 2]
            assert torch.equal(mean, sum(given) / world)
            assert same(gathered, [payload(rank) for rank in range(world)])
            assert torch.equal(second, mean + 3)


def test_one_rank_may_be_far_ahead():
    """It says many words before another says its first; what comes early waits in the sockets."""
    with Group(2) as group:
        gate = threading.Event()

        def talk(rank):
            if rank:
                assert gate.wait(10)
            waits = [group.transports[rank].begin(Mean(torch.full((50_000,), float(rank + n)))) for n in range(40)]
            gate.set()
            return [float(wait()[0]) for wait in waits]

        assert group.all(talk) == [[n + 0.5 for n in range(40)]] * 2


@pytest.mark.parametrize("other", [Mean(torch.zeros(11)), Gather((torch.zeros(10),)), Mean(torch.zeros(10).double())])
def test_a_rank_that_says_another_word_is_named(other):
    with Group(3) as group:

        def talk(rank):
            with pytest.raises(MismatchError) as caught:
                group.transports[rank].answer(other if rank == 1 else Mean(torch.zeros(10)))
            return str(caught.value)

        told = group.all(talk)
        assert all("rank 1 said another word" in told[rank] for rank in (0, 2))


def test_a_peer_that_ends_is_noticed_at_once_and_named():
    with Group(3) as group:
        group.all(lambda rank: group.transports[rank].answer(Gather((torch.tensor([rank]),))))

        def talk(rank):
            if rank == 2:
                group.transports[2].close()
                return ""
            with pytest.raises(PeerLost) as caught:
                group.transports[rank].answer(Mean(torch.zeros(10)))
            return str(caught.value)

        told = group.all(talk)
        assert "rank 2 is gone" in told[0]
        assert "rank 2 is gone" in told[1]


def test_who_is_not_needed_any_more_may_leave():
    with Group(3) as group:
        gate = threading.Event()

        def talk(rank):
            transport = group.transports[rank]
            if rank < 2:
                assert gate.wait(10)
            found = transport.answer(Mix((torch.tensor([rank]),), ((1 - rank, 1.0),) if rank < 2 else ((2, 1.0),)))
            if rank == 2:
                transport.close()
                gate.set()
            return int(found[0][0])

        assert group.all(talk) == [1, 0, 2]


def test_strangers_are_hung_up_on():
    import socket

    engines = SimulatedGroup(2, patience_seconds=20.0).transports

    def meddled(rank, text):
        """Before rank 0 hears of anybody, somebody else calls it, who knows no secret."""
        heard = engines[rank].gather_text(text)
        if rank == 1:
            host, port, _ = heard[0].split()
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.sendall(b"x" * 40)
        return heard

    with ThreadPoolExecutor(2) as pool:
        tickets = [
            pool.submit(connect, rank, 2, "127.0.0.1", lambda text, rank=rank: meddled(rank, text)) for rank in (0, 1)
        ]
        ends = [ticket.result(20) for ticket in tickets]
    for end in ends:
        for each in end:
            if each is not None:
                each.close()


@dataclass(frozen=True)
class Broken:
    """A table that some mistake was made in."""

    spoil: object
    name = "broken"

    def pieces(self, world):
        return Ring().pieces(world)

    def hops(self, rank, world):
        return tuple(self.spoil(rank, place, hop) for place, hop in enumerate(Ring().hops(rank, world)))


def kept_instead(rank, place, hop):
    does = "keep" if rank == 1 and hop.round == 0 and hop.does == "add" else hop.does
    return Hop(round=hop.round, does=type(hop.does)(does), peer=hop.peer, first=hop.first, stop=hop.stop)


def test_a_table_that_forgets_to_add_is_found_out():
    given = whole_numbers(3, 1000)
    with Group(3, Broken(kept_instead)) as group:
        heard = group.answers([Mean(each) for each in given])
    with pytest.raises(AssertionError):
        assert all(torch.equal(each, sum(given) / 3) for each in heard)

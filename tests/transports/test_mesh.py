"""Words over connected sockets, in one process: a thread for each rank."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from gossamer.collectives import Direct, HalvingDoubling, Hierarchical, Hop, Ring, Tree
from gossamer.errors import ConnectError, MismatchError, PeerLost
from gossamer.kernels.native import library
from gossamer.transports import mesh as loops
from gossamer.transports.greeting import connect
from gossamer.transports.links import Links
from gossamer.transports.mesh import Mesh
from gossamer.transports.meshed import MeshTransport, meshed
from gossamer.transports.picker import Picker, check_wish
from gossamer.transports.programs import straight_program
from gossamer.transports.simulated import SimulatedGroup, answers
from gossamer.words import Exchange, Gather, Mean, Mix, Together

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")

MESSAGE = 2**18  # bytes
COLLECTIVES = [Direct(), Ring(), HalvingDoubling(), Tree(), Hierarchical(per_node=2), Hierarchical(per_node=3)]


class Always(Picker):
    """Picks the same table whatever is asked."""

    def __init__(self, table, world):
        super().__init__("auto", Links(((0.0,) * world,) * world, 1e9))
        self._table = table

    def __call__(self, nbytes, itemsize, ranks):
        return self._table


class Group:
    """`world` ranks on loopback, each with a thread of its own."""

    def __init__(self, world, collective=None):
        self.world = world
        self.pool = ThreadPoolExecutor(world)
        self.engines = SimulatedGroup(world, patience_seconds=20.0).transports
        self.sockets = self.all(lambda rank: connect(rank, world, "127.0.0.1", self.engines[rank].gather_text))
        self.transports = [
            MeshTransport(engine, Mesh(rank, self.sockets[rank]), Always(collective or Direct(), world), meshed)
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


def test_who_left_first_is_named_though_others_follow():
    """On a ring rank 1 waits for rank 0 only, which leaves because rank 2 did."""
    with Group(3, Ring()) as group:
        first, second = threading.Event(), threading.Event()

        def talk(rank):
            transport = group.transports[rank]
            if rank == 2:
                transport.close()
                first.set()
                return ""
            assert first.wait(10)
            if rank == 0:
                assert second.wait(10)
                transport.close()
                return ""
            wait = transport.begin(Mean(torch.zeros(10)))
            threading.Timer(0.05, second.set).start()
            with pytest.raises(PeerLost) as caught:
                wait()
            return str(caught.value)

        assert "rank 2 is gone" in group.all(talk)[1]


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
    engines = SimulatedGroup(2, patience_seconds=20.0).transports

    def meddled(rank, text):
        """Before rank 0 hears of anybody, somebody else calls it, who knows no secret."""
        heard = engines[rank].gather_text(text)
        if rank == 1 and heard[0]:
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


def test_who_waits_while_another_thread_closes_is_told():
    with Group(2) as group:
        waiting = group.transports[0].begin(Mean(torch.zeros(100_000)))
        ticket = group.pool.submit(waiting)
        group.transports[0].close()
        for wait in (lambda: ticket.result(10), lambda: group.transports[0].answer(Mean(torch.zeros(10)))):
            with pytest.raises(PeerLost, match="its own connections were closed here"):
                wait()


def test_memory_lives_while_the_loops_may_write_there_though_nobody_waits():
    with Group(2) as group:
        tensors = torch.zeros(1000), torch.zeros(1000)
        alive = [weakref.ref(each) for each in tensors]
        waits = [group.transports[0].begin(Mean(each, each)) for each in tensors]
        group.transports[1].begin(Mean(torch.zeros(1000)))
        group.transports[1].begin(Mean(torch.zeros(1000)))
        group.pool.submit(waits[0])
        del tensors, waits
        assert alive[1]() is not None
        group.transports[0].close()
        assert alive[1]() is None


def test_a_rank_that_says_its_words_in_another_order_is_named_instead_of_waited_for():
    with Group(2) as group:

        def talk(rank):
            transport, numbers = group.transports[rank], torch.zeros(2_000_000)
            if rank == 0:
                with pytest.raises(MismatchError, match="rank 1"):
                    transport.answer(Mean(numbers))
                transport.close()
                return
            first = transport.begin(Mean(numbers))
            transport.begin(Mean(numbers))
            with pytest.raises(PeerLost):
                first()

        group.all(talk)


def test_the_loops_return_in_time_though_something_always_comes():
    here, there = socket.socketpair()
    here.setblocking(False)
    room, over = torch.zeros(1000, dtype=torch.uint8), threading.Event()
    mesh = Mesh(0, [None, here])
    word = mesh.begin(straight_program((0, 0), (0, 1000), 7), [0, 0, 0, room.data_ptr()], room)

    def trickle():
        for byte in struct.pack("<4I", 0, 7, 0, 0) + bytes(900):
            there.send(bytes([byte]))
            if over.wait(0.005):
                return

    teller = threading.Thread(target=trickle)
    teller.start()
    began = time.monotonic()
    peer, error = ctypes.c_int32(), ctypes.c_int32()
    answer = loops._WAIT(mesh._handle, word, 100, ctypes.byref(peer), ctypes.byref(error))
    took = time.monotonic() - began
    over.set()
    teller.join()
    mesh.close()
    there.close()
    assert (answer, took < 2) == (loops.NOT_YET, True)


def test_a_forked_child_writes_nothing_into_what_has_the_sockets_numbers_now():
    with Group(2) as group:
        if (child := os.fork()) == 0:
            code = 1
            try:
                _taken = [socket.socketpair() for _ in range(2)]
                group.transports[0].begin(Mean(torch.ones(10)))
            except PeerLost:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(torch.equal(each, torch.ones(3)) for each in group.answers([Mean(torch.ones(3))] * 2))


def test_a_mean_may_be_written_between_other_numbers():
    given = whole_numbers(2, 1000)
    rooms = [torch.zeros(2000) for _ in given]
    with Group(2) as group:
        group.answers([Mean(each, room[::2]) for each, room in zip(given, rooms, strict=True)])
    for room in rooms:
        assert torch.equal(room[::2], sum(given) / 2)
        assert not room[1::2].any()


def both(act):
    """What two ranks come to, in threads of their own."""
    engines = SimulatedGroup(2, patience_seconds=10.0).transports
    with ThreadPoolExecutor(2) as pool:
        tickets = [pool.submit(act, engine) for engine in engines]
        return [ticket.exception(20) or ticket.result() for ticket in tickets]


def test_ranks_that_ask_for_different_collectives_are_told():
    found = both(lambda engine: meshed(engine, "127.0.0.1", ("ring", "tree")[engine.rank]))
    assert all(isinstance(each, MismatchError) and "ring, tree" in str(each) for each in found)


def test_the_engine_serves_all_where_one_asks_for_it():
    found = both(lambda engine: meshed(engine, "127.0.0.1", ("engine", "auto")[engine.rank]))
    assert not any(isinstance(each, MeshTransport | Exception) for each in found)


def test_an_address_where_one_cannot_listen_is_told_to_all():
    found = both(lambda engine: connect(engine.rank, 2, ("127.0.0.1", "192.0.2.1")[engine.rank], engine.gather_text))
    assert all(isinstance(each, ConnectError) and "rank 1 at 192.0.2.1" in str(each) for each in found)


def test_nobody_waits_for_a_rank_that_could_not_call():
    def elsewhere(engine, text):
        """As a rank on another machine hears of loopback: nobody listens there."""
        heard = engine.gather_text(text)
        return [f"127.0.0.1 1 {text.split()[2]}" for text in heard] if engine.rank and heard[0] else heard

    began = time.monotonic()
    found = both(lambda engine: connect(engine.rank, 2, "127.0.0.1", lambda text: elsewhere(engine, text)))
    assert all(isinstance(each, ConnectError) and "rank 1" in str(each) for each in found)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("wish", ["hierarchical(", "hierarchical(4", "hierarchical(0)", "hierarchical(²)", "ring(4)"])
def test_what_is_no_collective_is_refused(wish):
    check_wish("hierarchical(4)")
    with pytest.raises(ValueError, match="is no collective"):
        check_wish(wish)


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


def test_a_run_that_is_resumed_picks_as_the_one_that_it_continues():
    near, far = 0.0002, 0.08
    sites = Links(tuple(tuple(near if a % 2 == b % 2 else far for b in range(4)) for a in range(4)), 2e8)
    flat = Links(((near,) * 4,) * 4, 1e9)
    picker = Picker("ring", flat)  # along fast links
    everyone = (0, 1, 2, 3)
    before = picker(4_000_000, 4, everyone)
    with Group(4) as group:
        first, second = group.transports[:2]
        first._pick = picker
        first.links = sites.text
        assert Links.of(first.links) == sites
        assert picker(4_000_000, 4, everyone) == Picker("ring", sites)(4_000_000, 4, everyone) != before
        second.links = flat.among((0, 1)).text  # of another number of workers
        second.links = ""
        assert len(Links.of(second.links).round_trips) == 4


def test_links_among_some_are_those_between_them():
    links = Links(tuple(tuple(float(10 * a + b) for b in range(4)) for a in range(4)), 5.0)
    assert links.among((1, 3)) == Links(((11.0, 13.0), (31.0, 33.0)), 5.0)

"""Standalone mesh: what the loops serve and what they do not is answered as by the reference, without an engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.mesh_group import same
from support.standalone_group import StandaloneGroup, connected, near

from gossamer.algorithms.collectives import DirectAllReduce, RingAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced, InGroup, NeighborAllGather
from gossamer.comm.mesh import standalone
from gossamer.comm.mesh.collective_selector import CollectivePrices
from gossamer.comm.mesh.connect import shut_down
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.operations import MeshOperations
from gossamer.comm.mesh.standalone import standalone_mesh
from gossamer.errors import GossamerError, MalformedError, MismatchError, PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def numbers(rank, dtype=torch.float32):
    return torch.arange(30).mul(rank + 3).remainder(11).to(dtype).view(5, 6)


def payload(rank):
    return numbers(rank), torch.tensor([rank, 7], dtype=torch.int16), numbers(rank, torch.bool).t()


def every_op(rank, world):
    """One of each kind, of tensors that the loops serve and of such that they do not."""
    ring = ((rank, 0.5), ((rank + 1) % world, 0.5))
    parts = tuple((torch.full((peer + 1,), 10 * rank + peer),) for peer in range(world))
    return [
        *(AllReduceMean(numbers(rank, dtype)) for dtype in DTYPES),
        AllReduceMean(numbers(rank).t()),
        AllReduceMean(numbers(rank, torch.int64), numbers(0, torch.int64).clone()),
        AllGather(payload(rank)),
        AllToAll(parts),
        NeighborAllGather(payload(rank), ring, ((rank - 1) % world, rank)),
        InGroup((rank,), AllReduceMean(numbers(rank, torch.int32))),
        Coalesced((AllReduceMean(numbers(rank, torch.int64)), AllGather(payload(rank)))),
        # as for a bucket with Route, and the report of the step
        Coalesced((Coalesced((AllReduceMean(numbers(rank)), AllGather(payload(rank)))), AllGather(payload(rank)))),  # type: ignore[arg-type]
    ]


def alike(heard, expected):
    if isinstance(heard, torch.Tensor):
        return heard.dtype == expected.dtype and torch.equal(heard, expected)
    return len(heard) == len(expected) and all(map(alike, heard, expected))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_operation_is_answered_as_by_the_reference(world):
    with StandaloneGroup(world, "direct") as group:
        ops = [every_op(rank, world) for rank in range(world)]
        expected = [
            answer_all(at_once) for at_once in zip(*[every_op(rank, world) for rank in range(world)], strict=True)
        ]
        for place, at_once in enumerate(zip(*ops, strict=True)):
            assert alike(group.answers(at_once), expected[place]), at_once[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_lies_on_a_gpu_is_answered_there():
    def on_gpu(rank):
        return [op.map(torch.Tensor.cuda) for op in every_op(rank, 2)]

    expected = [answer_all(at_once) for at_once in zip(on_gpu(0), on_gpu(1), strict=True)]
    with StandaloneGroup(2, "direct") as group:
        for place, at_once in enumerate(zip(on_gpu(0), on_gpu(1), strict=True)):
            assert alike(group.answers(at_once), expected[place]), at_once[0]


def test_a_mean_that_is_no_mean_is_found_out(monkeypatch):
    """The twin of the test above."""
    monkeypatch.setattr(standalone, "rank_order_mean", lambda tensors: tensors[0])
    with pytest.raises(AssertionError):
        test_every_operation_is_answered_as_by_the_reference(2)


@pytest.mark.parametrize("world", [1, 3])
def test_texts_of_any_length_travel_over_the_mesh(world):
    texts = ["", "ä" * 70_000, "rank 2"][:world]
    with StandaloneGroup(world) as group:
        assert group.all(lambda rank: group.transports[rank].all_gather_text(texts[rank])) == [texts] * world


def test_a_text_that_is_too_long_is_refused_before_anything_is_allocated(monkeypatch):
    with StandaloneGroup(3) as group:
        monkeypatch.setattr(standalone, "MOST_TEXT_BYTES", 100)
        monkeypatch.setattr(MeshOperations, "begin_bytes", None)

        def talk(rank):
            with pytest.raises(MalformedError, match="rank 1 announced a text of 101 bytes"):
                group.transports[rank].all_gather_text("x" * (100 + (rank == 1)))

        group.all(talk)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(MalformedError, match="rank 3"):
        standalone._text(3, torch.tensor([0xFF], dtype=torch.uint8))


class Table(CollectivePrices):
    """Choices that are known for all links, or for none; a simulation chooses the ring."""

    def __init__(self, complete):
        super().__init__(lambda mean, links: RingAllReduce())
        self.note(BIG)
        self._complete = complete

    def covers(self, links):
        return self._complete


BIG = (4_000_000, 4)


def choices(group, world):
    return [each._operations.pick(*BIG, tuple(range(world))) for each in group.transports]


@pytest.mark.parametrize("complete", [(True, True, True), (True, False, True)])
def test_all_ranks_choose_provisionally_if_one_would_have_to_simulate(complete):
    with StandaloneGroup(3, prices=[Table(each) for each in complete]) as group:
        expected = RingAllReduce() if all(complete) else DirectAllReduce()
        assert choices(group, 3) == [expected] * 3
        for each in group.transports:
            each.settle()
        assert choices(group, 3) == [RingAllReduce()] * 3


def test_a_newcomer_without_a_table_chooses_as_the_others():
    with StandaloneGroup(3, prices=[Table(False), Table(False), CollectivePrices()]) as group:
        assert choices(group, 3) == [DirectAllReduce()] * 3


def test_ranks_that_know_different_links_measure_them():
    """One of them may have left the previous group after its links were measured, and another before."""
    with StandaloneGroup(2, links_of=lambda rank: near(2) if rank else None) as group:
        links = [Links.of(transport.links) for transport in group.transports]
        assert links[0] == links[1] != near(2)


def test_the_links_are_measured_where_they_are_not_known():
    with StandaloneGroup(2, known=None) as group:
        links = [Links.of(transport.links) for transport in group.transports]
        assert links[0] == links[1]
        assert links[0].up[0] > 1.0
    with StandaloneGroup(2) as group:
        assert Links.of(group.transports[0].links) == near(2)


def test_everyone_has_what_the_source_had():
    with StandaloneGroup(3) as group:
        given = [[numbers(rank), numbers(rank, torch.int64).t()] for rank in range(3)]
        group.all(lambda rank: group.transports[rank].broadcast_(given[rank], 2))
        assert all(same([mine], [[numbers(2), numbers(2, torch.int64).t()]]) for mine in given)


def test_what_is_delivered_comes_to_whom_it_is_for():
    """Rank 1 is told by 0 and 2; rank 0 by nobody; bytes differ in number."""
    with StandaloneGroup(3) as group:
        given = [torch.arange(300_000 + rank).to(torch.uint8) for rank in range(3)]
        told = [{1: given[0]}, {2: given[1][:7]}, {1: given[2]}]
        heard = [{}, {0: len(given[0]), 2: len(given[2])}, {1: 7}]
        found = group.all(lambda rank: group.transports[rank].deliver(told[rank], heard[rank]))
        assert found[0] == {}
        assert torch.equal(found[1][0], given[0])
        assert torch.equal(found[1][2], given[2])
        assert torch.equal(found[2][1], given[1][:7])


def test_who_closes_gives_the_reason_to_whoever_waits():
    with StandaloneGroup(2) as group:
        waiting = group.transports[0].begin(AllReduceMean(torch.zeros(100_000)))
        ticket = group.pool.submit(waiting)
        group.transports[0].close("view 7 is over")
        group.transports[0].close("another reason")
        for wait in (lambda: ticket.result(10), lambda: group.transports[0].answer(AllReduceMean(torch.zeros(10)))):
            with pytest.raises(PeerLost, match="view 7 is over"):
                wait()


def test_a_mesh_that_is_still_waited_for_can_be_given_up():
    """Rank 1 is connected and never says anything."""
    ends = connected(2)
    with ThreadPoolExecutor(1) as pool:
        ticket = pool.submit(standalone_mesh, 0, ends[0], "auto", near(2), gives_notice=True)
        with pytest.raises(TimeoutError):
            ticket.result(0.05)
        shut_down(ends[0])
        with pytest.raises(PeerLost):
            ticket.result(10)
    assert ends[0][1].fileno() == -1
    ends[1][0].close()


def test_ranks_that_ask_for_different_collectives_are_reported_and_hang_up():
    ends = connected(2)
    with ThreadPoolExecutor(2) as pool:
        tickets = [
            pool.submit(standalone_mesh, rank, ends[rank], wish, near(2), gives_notice=True)
            for rank, wish in enumerate(("ring", "tree"))
        ]
        for ticket in tickets:
            with pytest.raises(MismatchError, match="ring, tree"):
                ticket.result(10)
    assert all(each.fileno() == -1 for end in ends for each in end if each is not None)


def test_what_has_no_meaning_without_an_engine_is_refused():
    with StandaloneGroup(1) as group, pytest.raises(GossamerError, match="an elastic run has no sites"):
        group.transports[0].part(1)
    with pytest.raises(ValueError, match="Omit --collective"):
        standalone_mesh(0, [None], "engine", None, gives_notice=True)


def test_without_the_compiled_loops_there_is_no_such_run(monkeypatch):
    monkeypatch.setattr(standalone, "available", lambda: False)
    with pytest.raises(GossamerError, match=r"kernels-src/build\.py"):
        standalone_mesh(0, [None], "auto", None, gives_notice=True)

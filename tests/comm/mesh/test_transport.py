"""Broadcast over the mesh: one op for any number of tensors."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref

import pytest
import torch
from support.mesh_group import Group, SealedGroup, SealedSharedGroup, SharedGroup

from gossamer.algorithms.collectives import RingAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllGather, AllReduceMean, NeighborAllGather
from gossamer.comm.mesh import native_mesh
from gossamer.comm.mesh.program import broadcast_program, segments
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import MismatchError, PeerLost
from gossamer.train.session.group_calls import leave

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


def tensors(rank):
    """Of any shape, dtype and layout; some are smaller than there are ranks, one is larger than a message."""
    source = torch.Generator().manual_seed(rank)
    large = torch.randn(300, 501, generator=source)
    return [
        *(torch.full((), rank), torch.empty(0), torch.full((3,), rank, dtype=torch.uint8)),
        *(large, torch.randn(8, 6, generator=source).t(), torch.full((5,), 1.0 + rank, dtype=torch.bfloat16)),
        torch.tensor([True, False, rank % 2 == 0]),
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_everyone_has_what_the_source_had_and_the_source_keeps_it(world):
    for source in (0, world - 1):
        given = [tensors(rank) for rank in range(world)]
        with Group(world) as group:
            group.all(lambda rank, given=given, source=source: group.transports[rank].broadcast_(given[rank], source))
        for mine in given:
            assert all(torch.equal(a, b) for a, b in zip(mine, tensors(source), strict=True))


def test_ranks_that_send_other_sizes_are_reported():
    with Group(2) as group, pytest.raises(MismatchError, match="another collective"):
        group.all(lambda rank: group.transports[rank].broadcast_([torch.zeros(3 + rank)]))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 1, 7), (1, 1, 1), (100, 3), (0, 0, 9)])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_segments_are_every_byte_once_and_in_order(sizes, pieces):
    parts = segments(sizes, pieces)
    found = [(each.tensor, each.offset + i) for part in parts for each in part for i in range(each.nbytes)]
    assert found == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(each.nbytes for each in part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_no_two_messages_between_two_ranks_have_one_name():
    for rank in range(4):
        program, _ = broadcast_program((7, 900, 0, 3), 1, rank, (0, 1, 2, 3))
        rows = [tuple(program.rows[i : i + 5]) for i in range(0, len(program.rows), 5)]
        names = [(does == 0, peer, tag) for does, peer, _, _, tag in rows]
        assert len({*names}) == len(names)


# -- progress of the mesh while its communication thread is idle -------------------------------------------------------


NUMEL = 2_000_000  # more than sockets hold


def moved(transports, turns=10_000):
    """Whether all say that nothing is left to do, after some turns of each."""
    return any(sum(transport.make_progress() for transport in transports) == 0 for _ in range(turns))


def test_words_are_answered_before_anybody_waits_for_them():
    with Group(2) as group:
        given = [torch.full((NUMEL,), 2.0 * rank) for rank in range(2)]
        waits = [transport.begin(AllReduceMean(each)) for transport, each in zip(group.transports, given, strict=True)]
        assert moved(group.transports)
        assert group.transports[0]._mesh._answered == {0}
        assert all(torch.equal(wait(), torch.ones(NUMEL)) for wait in waits)
        assert not group.transports[0]._mesh._answered
        assert moved(group.transports, turns=1)  # there is nothing left


def test_a_word_that_only_one_has_begun_is_still_under_way():
    with Group(2) as group:
        group.transports[0].begin(AllReduceMean(torch.zeros(NUMEL)))
        assert not moved(group.transports, turns=3)


def test_what_goes_wrong_meanwhile_is_told_to_whoever_waits():
    with Group(2) as group:
        wait = group.transports[0].begin(AllReduceMean(torch.zeros(NUMEL)))
        group.transports[1].close()
        assert moved(group.transports[:1])
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            wait()
        group.transports[0].close()
        assert not group.transports[0].make_progress()


def check_lane_works_meanwhile(meanwhile):
    """A communication thread does something else until a job is there, does the job, and goes on."""
    turns, enough, again = [], threading.Event(), threading.Event()

    def turn():
        turns.append(None)
        (again if enough.is_set() else enough).set()
        return not again.is_set()

    comm_thread = CommThread([torch.device("cpu")], *([turn] if meanwhile else []))
    assert enough.wait(5.0 if meanwhile else 0.05)
    assert comm_thread.submit(lambda: len(turns)).wait() >= 1
    assert again.wait(5.0)
    count = len(turns)  # it has said that there is nothing left, so the communication thread waits for jobs
    assert comm_thread.submit(lambda: len(turns)).wait() == count
    comm_thread.close()


def test_a_lane_does_something_else_until_a_job_is_there():
    check_lane_works_meanwhile(meanwhile=True)


def test_a_lane_that_only_waits_is_found_out():
    with pytest.raises(AssertionError):
        check_lane_works_meanwhile(meanwhile=False)


def check_turns_take_time(make_progress):
    """Whoever has something under way asks again and again: in between it sleeps, or a core is lost to it."""
    began, turns = time.perf_counter(), 0
    while time.perf_counter() - began < 0.1:
        make_progress()
        turns += 1
    assert turns < 1000


def test_a_turn_in_which_nothing_comes_takes_time(monkeypatch):
    with Group(2) as group:
        group.transports[0].begin(AllReduceMean(torch.zeros(NUMEL)))
        for _ in range(100):
            group.transports[0].make_progress()
        check_turns_take_time(group.transports[0].make_progress)
        monkeypatch.setattr(native_mesh, "MOMENT_MILLISECONDS", 0)
        with pytest.raises(AssertionError):
            check_turns_take_time(group.transports[0].make_progress)


def test_what_goes_wrong_meanwhile_fails_the_next_job_and_ends_no_thread():
    def fails():
        raise MemoryError("none left")

    comm_thread = CommThread([torch.device("cpu")], fails)
    for _ in range(2):
        ticket = comm_thread.submit(lambda: None)
        assert ticket._done.wait(5.0)
        with pytest.raises(MemoryError, match="none left"):
            ticket.wait()
    comm_thread.close()


class Closed:
    """A transport that is closed amid what it does, where its lock would not open."""

    def __init__(self):
        self.lock, self.done = threading.Lock(), threading.Event()

    def close(self):
        assert self.lock.acquire(timeout=5.0)
        self.done.set()


def check_leaves_from_its_own_lane(leaving, beside=False):
    """Garbage is collected in any thread: a session may end on its own communication thread, between two calls."""
    transport, comm_thread = Closed(), CommThread([torch.device("cpu")])

    def work():
        with transport.lock:
            leaving(comm_thread, [transport], os.getpid())

    (comm_thread.sibling() if beside else comm_thread).submit(work).wait()
    assert transport.done.wait(5.0)
    assert not comm_thread.is_here
    comm_thread._thread.join(5.0)
    assert not comm_thread._thread.is_alive()


@pytest.mark.parametrize("beside", [False, True])
def test_a_session_may_end_on_its_own_lane(beside):
    check_leaves_from_its_own_lane(leave, beside)


def test_a_lane_that_would_wait_for_itself_is_found_out():
    with pytest.raises(RuntimeError):
        check_leaves_from_its_own_lane(lambda comm_thread, transports, process: comm_thread.close())


# -- Mesh failures: ranks that end, close, fork, or say other ops, in one process: a thread for each rank --------------


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
@pytest.mark.parametrize(
    "other", [AllReduceMean(torch.zeros(11)), AllGather((torch.zeros(10),)), AllReduceMean(torch.zeros(10).double())]
)
def test_a_rank_that_says_another_word_is_named(kind, other):
    with kind(3) as group:

        def talk(rank):
            with pytest.raises(MismatchError) as caught:
                group.transports[rank].answer(other if rank == 1 else AllReduceMean(torch.zeros(10)))
            return str(caught.value)

        told = group.all(talk)
        assert all(f"rank 1 issued another collective than rank {rank}" in told[rank] for rank in (0, 2))


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_promise_12_a_rank_that_says_its_words_in_another_order_is_named_instead_of_waited_for(kind):
    with kind(2) as group:

        def talk(rank):
            transport, numbers = group.transports[rank], torch.zeros(2_000_000)
            if rank == 0:
                with pytest.raises(MismatchError, match="rank 1"):
                    transport.answer(AllReduceMean(numbers))
                transport.close()
                return
            first = transport.begin(AllReduceMean(numbers))
            transport.begin(AllReduceMean(numbers))
            with pytest.raises((MismatchError, PeerLost)):
                first()

        group.all(talk)


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_a_peer_that_ends_is_noticed_at_once_and_named(kind):
    with kind(3) as group:
        group.all(lambda rank: group.transports[rank].answer(AllGather((torch.tensor([rank]),))))

        def talk(rank):
            if rank == 2:
                group.transports[2].close()
                return ""
            with pytest.raises(PeerLost) as caught:
                group.transports[rank].answer(AllReduceMean(torch.zeros(10)))
            return str(caught.value)

        told = group.all(talk)
        assert "rank 2 is gone" in told[0]
        assert "rank 2 is gone" in told[1]
        assert "If it only ended its session while rank 0 continued, stop all ranks together" in told[0]
        assert "session.request_stop()" in told[1]


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_a_peer_that_left_first_is_named_though_others_follow(kind):
    """On a ring rank 1 waits for rank 0 only, which leaves because rank 2 did."""
    with kind(3, RingAllReduce()) as group:
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
            wait = transport.begin(AllReduceMean(torch.zeros(10)))
            threading.Timer(0.05, second.set).start()
            with pytest.raises(PeerLost) as caught:
                wait()
            return str(caught.value)

        assert "rank 2 is gone" in group.all(talk)[1]


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_a_peer_that_is_not_needed_any_more_may_leave(kind):
    with kind(3) as group:
        gate = threading.Event()

        def talk(rank):
            transport = group.transports[rank]
            if rank < 2:
                assert gate.wait(10)
            found = transport.answer(
                NeighborAllGather((torch.tensor([rank]),), ((1 - rank, 1.0),) if rank < 2 else ((2, 1.0),))
            )
            if rank == 2:
                transport.close()
                gate.set()
            return int(found[0][0])

        assert group.all(talk) == [1, 0, 2]


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_who_waits_while_another_thread_closes_is_told(kind):
    with kind(2) as group:
        waiting = group.transports[0].begin(AllReduceMean(torch.zeros(100_000)))
        ticket = group.pool.submit(waiting)
        group.transports[0].close()
        for wait in (lambda: ticket.result(10), lambda: group.transports[0].answer(AllReduceMean(torch.zeros(10)))):
            with pytest.raises(PeerLost, match="closed on rank 0 while a collective was pending"):
                wait()


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_memory_lives_while_the_loops_may_write_there_though_nobody_waits(kind):
    with kind(2) as group:
        tensors = torch.zeros(1000), torch.zeros(1000)
        alive = [weakref.ref(each) for each in tensors]
        waits = [group.transports[0].begin(AllReduceMean(each, each)) for each in tensors]
        group.transports[1].begin(AllReduceMean(torch.zeros(1000)))
        group.transports[1].begin(AllReduceMean(torch.zeros(1000)))
        group.pool.submit(waits[0])
        del tensors, waits
        assert alive[1]() is not None
        group.transports[0].close()
        assert alive[1]() is None


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup])
def test_a_forked_child_writes_nothing_into_what_has_the_sockets_numbers_now(kind):
    with kind(2) as group:
        if (child := os.fork()) == 0:
            code = 1
            try:
                _taken = [socket.socketpair() for _ in range(2)]
                group.transports[0].begin(AllReduceMean(torch.ones(10)))
            except PeerLost:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(torch.equal(each, torch.ones(3)) for each in group.answers([AllReduceMean(torch.ones(3))] * 2))

"""Mesh failures: ranks that end, close, fork, or say other ops, in one process: a thread for each rank."""

from __future__ import annotations

import os
import socket
import threading
import weakref

import pytest
import torch
from support.mesh_group import Group, SealedGroup, SealedSharedGroup, SharedGroup

from gossamer.algorithms.collectives import RingAllReduce
from gossamer.base.kernels.library import library
from gossamer.base.ops import AllGather, AllReduceMean, NeighborAllGather
from gossamer.errors import MismatchError, PeerLost

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the compiled loops are not there"),
    pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup, SealedSharedGroup]),
]


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
            with pytest.raises(PeerLost):
                first()

        group.all(talk)


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


def test_who_left_first_is_named_though_others_follow(kind):
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


def test_who_is_not_needed_any_more_may_leave(kind):
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


def test_who_waits_while_another_thread_closes_is_told(kind):
    with kind(2) as group:
        waiting = group.transports[0].begin(AllReduceMean(torch.zeros(100_000)))
        ticket = group.pool.submit(waiting)
        group.transports[0].close()
        for wait in (lambda: ticket.result(10), lambda: group.transports[0].answer(AllReduceMean(torch.zeros(10)))):
            with pytest.raises(PeerLost, match="closed on rank 0 while a collective was pending"):
                wait()


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

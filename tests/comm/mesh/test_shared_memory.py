"""Shared-memory messages between two ranks: the same bits, and sockets where there is no such memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.mesh_group import MESSAGE, Group, SealedSharedGroup, SharedGroup, both, payload, same, whole_numbers

from gossamer.algorithms.collectives import (
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.base.kernels.library import library
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll
from gossamer.comm.mesh import native_mesh as loops
from gossamer.comm.mesh import shared_memory
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.shared_memory import MARK_BYTES, NAME, SEALS, TURNS_BYTES, MemoryOffer
from gossamer.comm.mesh.transport import mesh_transport
from gossamer.errors import MismatchError, PeerLost

pytestmark = pytest.mark.skipif(
    library() is None or sys.platform != "linux", reason="the compiled loops are not there, or no such memory"
)

HEADER, TAG = 16, 16  # bytes
PAIR = 2_000_000  # numbers whose mean is 16 messages each way between two ranks


def pairs(group):
    """With whom each rank shares memory."""
    return [sorted(mesh._shared) for mesh in group.meshes]


def mapped():
    """How many pieces of such memory this process sees, and how many such files it has open."""
    numbers = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    name = f"/memfd:{NAME} "
    return Path("/proc/self/maps").read_text().count(name), sum(name in each for each in numbers)


@pytest.mark.parametrize(
    "collective",
    [DirectAllReduce(), RingAllReduce(), HalvingDoubling(), TreeAllReduce(), HierarchicalAllReduce(per_node=2)],
    ids=repr,
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_means_have_the_bits_that_they_have_over_sockets(world, collective):
    given = [torch.randn(1_000_001, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    heard = []
    for kind, shared in ((Group, False), (SharedGroup, True), (SealedSharedGroup, True)):
        with kind(world, collective) as group:
            heard += group.answers([AllReduceMean(each) for each in given])
            assert pairs(group) == [[peer for peer in range(world) if shared and peer != rank] for rank in range(world)]
    assert all(torch.equal(heard[0], each) for each in heard)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_means_in_other_formats_are_the_simulations(dtype):
    ops = [AllReduceMean(each) for each in whole_numbers(3, 300_001, dtype)]
    with SharedGroup(3) as group:
        assert all(torch.equal(each, answer_all(ops)[0]) for each in group.answers(ops))


def test_gathers_and_exchanges_answer_as_the_simulation_does():
    said = [
        [AllGather(payload(rank, MESSAGE)) for rank in range(3)],
        [AllToAll(tuple(payload(rank, MESSAGE + peer) for peer in range(3))) for rank in range(3)],
    ]
    with SharedGroup(3) as group:
        for ops in said:
            for heard, expected in zip(group.answers(ops), answer_all(ops), strict=True):
                assert same(heard, expected)


def together(meshes, op, passes=100):
    """What several ranks come to that look at their connections in turn and never sleep."""
    for _ in range(passes):
        found = [mesh._run(op, loops.TURN_MILLISECONDS) for mesh in meshes]
    return found


@pytest.mark.parametrize(("kind", "header"), [(SharedGroup, HEADER), (SealedSharedGroup, HEADER + TAG)])
def test_only_headers_go_through_the_socket(monkeypatch, kind, header):
    monkeypatch.setattr(loops, "TURN_MILLISECONDS", 0)
    with kind(3) as group:
        for transport in group.transports[:2]:
            transport.begin(AllReduceMean(torch.zeros(PAIR * 3 // 2)))
        assert together(group.meshes[:2], 0) == [loops.NOT_YET] * 2  # rank 2 is late
        assert group.meshes[0]._waits_for(0)[0][1] == 2 * 16 * header


def by_socket(mesh):
    """How many bytes its connection with rank 1 has carried, after one more turn."""
    assert mesh._run(0, loops.TURN_MILLISECONDS) == loops.NOT_YET
    return mesh._waits_for(0)[0][1]


def test_where_nothing_is_taken_the_socket_takes_what_finds_no_room(monkeypatch):
    monkeypatch.setattr(loops, "TURN_MILLISECONDS", 20)
    given = whole_numbers(2, PAIR)
    with SharedGroup(2) as group:
        first = group.transports[0].begin(AllReduceMean(given[0]))
        assert any(by_socket(group.meshes[0]) > MESSAGE for _ in range(500))  # once it has looked for room often enough
        ticket = group.pool.submit(first)
        assert torch.equal(group.transports[1].answer(AllReduceMean(given[1])), sum(given) / 2)
        assert torch.equal(ticket.result(10), sum(given) / 2)


def test_memory_that_is_not_the_same_is_found_out():
    class Apart(Group):
        def mesh(self, rank):
            return Mesh(rank, self.sockets[rank], shared={1 - rank: mmap.mmap(-1, TURNS_BYTES + 4 * MESSAGE)})

    def talk(rank):
        with pytest.raises((MismatchError, PeerLost)):
            group.transports[rank].answer(AllReduceMean(torch.zeros(PAIR)))
        group.transports[rank].close()

    with Apart(2) as group:
        group.all(talk)


def test_memory_of_another_size_is_refused():
    here, there = socket.socketpair()
    with here, there, pytest.raises(AssertionError, match="8192 bytes"):
        Mesh(0, [None, here], shared={1: mmap.mmap(-1, 8192)})


def test_nothing_is_left_behind():
    before = mapped()
    with SharedGroup(3) as group:
        assert mapped() == (before[0] + 6, before[1] + 6)
        group.transports[0].close()
        assert mapped() == (before[0] + 4, before[1] + 4)
    assert mapped() == before


def test_a_forked_child_does_not_keep_it():
    with SharedGroup(2) as group:
        if (child := os.fork()) == 0:
            os._exit(mapped() != (0, 0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(torch.equal(each, torch.ones(PAIR)) for each in group.answers([AllReduceMean(torch.ones(PAIR))] * 2))


def test_the_environment_turns_it_off(monkeypatch):
    monkeypatch.setenv("GOSSAMER_SHARED_MEMORY", "0")
    with SharedGroup(2) as group:
        assert pairs(group) == [[], []]
        assert all(torch.equal(each, torch.ones(PAIR)) for each in group.answers([AllReduceMean(torch.ones(PAIR))] * 2))


def refused(*_):
    raise PermissionError("not here")


@pytest.mark.parametrize("step", ["readlink", "open", "memfd_create"])
def test_where_it_is_refused_sockets_do(monkeypatch, step):
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, step, refused)
        group = SharedGroup(2)
    with group:
        assert pairs(group) == [[], []]
        assert all(torch.equal(each, torch.ones(PAIR)) for each in group.answers([AllReduceMean(torch.ones(PAIR))] * 2))


def test_workers_at_other_addresses_use_sockets():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0)) as other,
        socket.create_connection(listener.getsockname()) as near,
    ):
        assert not shared_memory._is_here(other)
        assert shared_memory._is_here(near)
        here, there = socket.socketpair()
        with here, there:
            assert not shared_memory._is_here(here)


@pytest.mark.parametrize(("others", "slots"), [(0, 0), (1, 8), (7, 8), (15, 4), (64, 1), (65, 0)])
def test_one_worker_has_no_more_than_sixteen_mebibytes(others, slots):
    assert shared_memory._slots(others) == slots


@pytest.fixture
def offer():
    """Of memory that is as it should be."""
    number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 3 * TURNS_BYTES)
    os.pwrite(number, b"m" * MARK_BYTES, TURNS_BYTES - MARK_BYTES)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, SEALS)
    yield MemoryOffer(os.getpid(), number, 3 * TURNS_BYTES, (b"m" * MARK_BYTES).hex())
    os.close(number)


def test_what_was_offered_is_opened(offer):
    with shared_memory._open(offer) as memory:
        assert len(memory) == offer.nbytes


def unsealed():
    number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 3 * TURNS_BYTES)
    os.pwrite(number, b"m" * MARK_BYTES, TURNS_BYTES - MARK_BYTES)
    return number


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: {"nbytes": 2 * TURNS_BYTES},
        lambda: {"mark": (b"n" * MARK_BYTES).hex()},
        lambda: {"number": unsealed()},
        lambda: {"number": os.open("/dev/null", os.O_RDWR)},
        lambda: {"number": 10**6},
        lambda: {"process": 2**22 + 1},
    ],
)
def test_what_was_not_offered_is_not_opened(offer, wrong):
    fields = wrong()
    assert shared_memory._open(replace(offer, **fields)) is None
    if fields.get("number", 10**6) < 10**6:
        os.close(fields["number"])


def test_a_group_that_meets_shares_memory():
    found = both(lambda engine: mesh_transport(engine, "127.0.0.1"))
    assert [sorted(each._mesh._shared) for each in found] == [[1], [0]]
    for each in found:
        each.close()


def test_a_word_that_says_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv("GOSSAMER_SHARED_MEMORY", "off")
    with pytest.raises(
        ValueError, match=r"GOSSAMER_SHARED_MEMORY must be 0 or 1, got off.*Write GOSSAMER_SHARED_MEMORY=0"
    ):
        shared_memory.share(0, [None], lambda text: [text])

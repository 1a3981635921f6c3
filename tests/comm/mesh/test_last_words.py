"""Last words: whoever dies is named by all survivors, at once, whichever way the means go."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from support.mesh_group import Group, SealedGroup, SharedGroup
from support.nightly import once_each
from support.standalone_group import StandaloneGroup, connected

from gossamer.algorithms.collectives import DirectAllReduce, HalvingDoubling, RingAllReduce, TreeAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean, NeighborAllGather
from gossamer.comm.mesh import last_words, native_mesh
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.errors import MismatchError, PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

WORLD = 4


def said_by_survivors(kind, collective, numel, dead=2, patience=30.0):
    """What the others raise once a rank ends amid steps, and how many seconds after it they all have."""
    moments = {}
    with kind(WORLD, collective) as group:

        def talk(rank):
            numbers = torch.zeros(numel)
            try:
                for step in range(1000):
                    if rank == dead and step == 3:
                        moments[rank] = time.monotonic()
                        group.transports[rank]._mesh.close()
                        return None
                    group.transports[rank].answer(AllReduceMean(numbers))
            except PeerLost as lost:
                moments[rank] = time.monotonic()
                return str(lost)

        tickets = [group.pool.submit(talk, rank) for rank in range(WORLD)]
        told = [ticket.result(patience) for ticket in tickets]
    return told, max(moments.values()) - moments[dead]


def check_the_dead_is_named(told, dead=2):
    pattern = rf"rank {dead} is gone|is gone .*and so (is|are) ranks? [^:]*\b{dead}\b"
    assert all(re.search(pattern, each) for rank, each in enumerate(told) if rank != dead), told


COLLECTIVES = [RingAllReduce(), TreeAllReduce(), HalvingDoubling(), DirectAllReduce()]


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
@pytest.mark.parametrize("numel", [100, 100_000])
def test_every_survivor_hears_at_once_who_died(kind, collective, numel):
    told, seconds = said_by_survivors(kind, collective, numel)
    check_the_dead_is_named(told)
    assert seconds < 1.0


def closes_only_at_the_end(mesh, why=""):
    if not why:
        close(mesh)


close = Mesh.close


def test_without_hanging_up_the_others_wait_on(monkeypatch):
    """The twin of the test above: on a ring only neighbors of the dead notice."""
    monkeypatch.setattr(Mesh, "close", closes_only_at_the_end)
    with pytest.raises(TimeoutError):
        said_by_survivors(Group, RingAllReduce(), 100, patience=1.5)


def said_by_who_comes_late(collective, numel=100, dead=2, late=1, kind=Group):
    """A rank is busy while another one dies and the rest notice and hang up; then it joins the operation."""
    others = [rank for rank in range(WORLD) if rank not in (dead, late)]
    with kind(WORLD, collective) as group:
        group.all(lambda rank: group.transports[rank].answer(AllReduceMean(torch.zeros(numel))))

        def talk(rank):
            with pytest.raises(PeerLost) as caught:
                group.transports[rank].answer(AllReduceMean(torch.zeros(numel)))
            return str(caught.value)

        group.transports[dead]._mesh.close()
        tickets = [group.pool.submit(talk, rank) for rank in others]
        wait(tickets, 1.0)  # some may wait for the late one
        tickets.append(group.pool.submit(talk, late))
        return [ticket.result(30) for ticket in tickets]


@once_each("collective, late, kind", COLLECTIVES, [0, 1, 3], [Group, SealedGroup])
def test_a_peer_that_was_busy_meanwhile_is_told_who_died(collective, late, kind):
    assert all("rank 2 is gone" in each for each in said_by_who_comes_late(collective, late=late, kind=kind))


def test_without_last_words_who_hung_up_is_named_instead(monkeypatch):
    """The twin of the test above."""
    monkeypatch.setattr(last_words, "send_words", lambda *arguments: None)
    told = said_by_who_comes_late(RingAllReduce(), late=1)
    assert "rank 2 is gone" not in told[-1]


def test_a_silent_rank_is_named_by_those_who_did_not_wait_for_it(monkeypatch):
    """The news of a frozen rank, which hangs up on nobody, travels, too."""
    with Group(WORLD, RingAllReduce()) as group:
        group.meshes[3]._patience = native_mesh.StallTimeouts(notice_seconds=9.0, timeout_seconds=0.2)

        def talk(rank):
            with pytest.raises(PeerLost) as caught:
                group.transports[rank].answer(AllReduceMean(torch.zeros(100)))
            return str(caught.value)

        told = [ticket.result(30) for ticket in [group.pool.submit(talk, rank) for rank in (0, 1, 3)]]
        assert all("rank 2 sent nothing" in each for each in told)


@pytest.mark.parametrize("kind", [Group, SharedGroup, SealedGroup])
def test_a_mismatch_between_two_ranks_of_a_ring_is_raised_on_all(kind):
    errors = []
    with kind(5, RingAllReduce()) as group:

        def talk(rank):
            with pytest.raises(MismatchError, match="issued another collective"):
                group.transports[rank].answer(AllReduceMean(torch.zeros(10 + (rank == 1))))
            errors.append(rank)

        wait([group.pool.submit(talk, rank) for rank in range(5)], 5)
        assert sorted(errors) == [0, 1, 2, 3, 4]


def test_a_mismatch_amid_large_messages_ends_the_waits_of_all_ranks():
    errors = []
    with Group(5, RingAllReduce()) as group:

        def talk(rank):
            with pytest.raises((MismatchError, PeerLost)):  # words cannot follow a message that was cut
                group.transports[rank].answer(AllReduceMean(torch.zeros(5_000_000 + (rank == 1))))
            errors.append(rank)

        wait([group.pool.submit(talk, rank) for rank in range(5)], 5)
        assert sorted(errors) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [Group, SealedGroup])
def test_later_collectives_repeat_the_mismatch(kind):
    with kind(2) as group:
        other = group.pool.submit(group.transports[1].answer, AllReduceMean(torch.zeros(11)))
        for _ in range(3):
            with pytest.raises(MismatchError, match="as operation 0"):
                group.transports[0].answer(AllReduceMean(torch.zeros(10)))
        assert not group.transports[0].make_progress()
        assert isinstance(other.exception(10), MismatchError)


def test_a_reason_is_told_to_the_peers():
    with StandaloneGroup(2) as group:
        group.transports[0].close("view 7 is over")
        with pytest.raises(PeerLost, match="view 7 is over, as reported by rank 0"):
            group.transports[1].answer(AllReduceMean(torch.zeros(10)))


def test_a_peer_that_needs_nothing_more_of_a_rank_is_not_disturbed_by_its_last_words():
    """Rank 2 has hung up, with a reason, before the other two begin."""
    with StandaloneGroup(3) as group:
        group.transports[2].close("view 7 is over")

        def talk(rank):
            return group.transports[rank].answer(NeighborAllGather((torch.full((9,), rank),), ((1 - rank, 1.0),)))

        tickets = [group.pool.submit(talk, rank) for rank in (0, 1)]
        assert [int(ticket.result(10)[0][0][0]) for ticket in tickets] == [1, 0]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for each in ends:
        each.close()


def test_words_are_found_behind_whatever_was_not_read(pair):
    pair[0].sendall(b"x" * 1000)
    last_words.send_words(pair[0], "rank 2 is gone \x1b[31m" + "é" * 300, 7)
    assert last_words.waiting(pair, 1) == ""
    found, ended = last_words.found(pair[1])
    assert not ended
    assert found.startswith("rank 2 is gone [31mé")
    assert "\x1b" not in found


def test_words_are_found_behind_a_header_that_was_read(pair):
    for header in (16, 32):  # as it is, and where one with its tag was due
        last_words.send_words(pair[0], "rank 2 is gone", 2**32 - 1)
        pair[1].recv(header)
        assert last_words.waiting(pair, 1) == "rank 2 is gone, as reported by rank 1"
        assert last_words.cause(pair, 1, "reset") == "rank 2 is gone, as reported by rank 1"


def heard_in_two_packets():
    """The header of last words has come, and what follows it comes while a rank looks for it."""
    ((_, mine), (theirs, _)) = connected(2)
    sent = []
    last_words.send_words(SimpleNamespace(send=lambda data, flags: sent.append(data)), "rank 2 is gone", 0)
    theirs.sendall(sent[0][16:100])
    later = threading.Timer(0.02, theirs.sendall, [sent[0][100:]])
    later.start()
    told = last_words.waiting([None, mine], 1)
    later.join()
    mine.close()
    theirs.close()
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody waits for the rest")
def test_words_that_come_in_two_packets_are_waited_for():
    assert heard_in_two_packets() == "rank 2 is gone, as reported by rank 1"


def test_words_that_are_not_waited_for_are_missed(monkeypatch):
    """The twin of the test above."""
    monkeypatch.setattr(last_words, "COMING_SECONDS", 0)
    assert heard_in_two_packets() == ""


def test_a_connection_that_another_thread_closes_meanwhile_holds_no_words(pair, monkeypatch):
    monkeypatch.setattr(socket.socket, "setsockopt", lambda connection, *_: connection.close())
    assert last_words.waiting(pair, 1) == ""


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 5000, b"\0" * 480, last_words.MARK])
def test_what_is_no_last_word_is_none(pair, data):
    pair[0].sendall(data)
    pair[0].close()
    assert last_words.found(pair[1]) == ("", True)


def test_a_full_connection_takes_none_and_nobody_waits_for_it(pair):
    pair[0].setblocking(False)
    with suppress(BlockingIOError):
        while True:
            pair[0].send(b"x" * 65536)
    last_words.send_words(pair[0], "rank 2 is gone", 0)
    assert last_words.found(pair[1]) == ("", False)


def test_all_who_are_gone_without_a_word_are_named():
    pairs = [socket.socketpair() for _ in range(4)]
    mine = [None, *[mine for mine, _ in pairs]]
    for _, theirs in pairs[:3]:
        theirs.close()
    assert last_words.cause(mine, 2, "reset") == "rank 2 is gone (reset), and so are ranks 1 and 3: one was the first"
    for each in (*mine[1:], pairs[3][1]):
        each.close()

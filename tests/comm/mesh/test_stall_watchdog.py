"""Stall watchdog: connected peers that say nothing. Time goes on whenever somebody looks at it."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time

import pytest
import torch
from support.mesh_group import Group
from support.virtual_workers import notices

from gossamer import events
from gossamer.algorithms.collectives import (
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean
from gossamer.comm.mesh import native_mesh as loops
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import straight_program
from gossamer.comm.mesh.stall_watchdog import StallTimeouts, StallWatchdog, requested_timeouts
from gossamer.errors import PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

STEP_SECONDS = 25.0


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(loops, "TURN_MILLISECONDS", 1)


class Time:
    """Goes on by as much with every look, and `act` is called with what it is then."""

    def __init__(self, act=lambda now: None):
        self.now, self._act = 0.0, act

    def __call__(self):
        self.now += STEP_SECONDS
        self._act(self.now)
        return self.now


class Pair:
    """Rank 0, which waits for 1,000 bytes of rank 1, and the end of the connection that rank 1 would have."""

    def __init__(self, act=lambda now, there: None, bytes_told=0):
        here, self.there = socket.socketpair()
        here.setblocking(False)
        self.there.setblocking(False)
        patience = StallTimeouts(clock=Time(lambda now: act(now, self.there)))
        self.mesh = Mesh(0, [None, here], patience)
        told, heard = torch.zeros(max(1, bytes_told), dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
        program = straight_program((0, bytes_told), (0, 0 if bytes_told else 1000), 7)
        self.op = self.mesh.begin(program, [0, told.data_ptr(), 0, heard.data_ptr()], (told, heard))

    def wait(self):
        try:
            self.mesh.wait(self.op)
        finally:
            self.mesh.close()
            self.there.close()


MESSAGE = struct.pack("<4I", 0, 7, 0, 0) + bytes(1000)


def test_a_silent_peer_is_told_of_once_and_then_counts_as_lost():
    with notices() as told, pytest.raises(PeerLost, match=r"rank 1 sent nothing for 18\d\d s.*GOSSAMER_TIMEOUT=3600"):
        Pair().wait()
    assert len(told) == 1
    assert told[0].startswith("rank 0 has waited 75 s for rank 1: it may be busy (validating, saving), frozen")


def test_a_silence_is_an_event_once():
    told = []
    end = events.subscribe(lambda event: told.append(event) if isinstance(event, events.Stalled) else None)
    try:
        Pair(lambda now, there: now == 10 * STEP_SECONDS and there.send(MESSAGE)).wait()
    finally:
        end()
    assert [(each.rank, each.seconds, each.waits_for) for each in told] == [(0, 75.0, (1,))]


def test_whoever_comes_at_last_is_told_of_too():
    with notices() as told:
        Pair(lambda now, there: now == 10 * STEP_SECONDS and there.send(MESSAGE)).wait()
    assert [each.split(":")[0] for each in told] == [
        "rank 0 has waited 75 s for rank 1",
        "rank 0 continued after 225 s",
    ]


def test_nothing_is_told_of_who_is_not_late():
    with notices() as told:
        Pair(lambda now, there: now == 2 * STEP_SECONDS and there.send(MESSAGE)).wait()
    assert told == []


def trickle(now, there):
    """A byte with every look, so that all of it takes seven hours."""
    place = int(now / STEP_SECONDS) - 1
    there.send(MESSAGE[place : place + 1])


def test_any_byte_begins_the_time_again():
    with notices() as told:
        Pair(trickle).wait()
    assert told == []


def test_patience_that_does_not_see_bytes_is_found_out(monkeypatch):
    look = StallWatchdog.look
    monkeypatch.setattr(StallWatchdog, "look", lambda self, moved, waited_for: look(self, [0], waited_for))
    with notices(), pytest.raises(PeerLost):
        Pair(trickle).wait()


def test_a_peer_that_takes_nothing_is_named():
    with notices(), pytest.raises(PeerLost, match="rank 1 sent nothing"):
        Pair(bytes_told=10_000_000).wait()


def unanswered(seconds):
    """The kernel says that rank 1's machine has owed an acknowledgment for so long."""
    return lambda connection: seconds


def test_a_machine_that_acknowledges_nothing_is_lost_within_a_minute(monkeypatch):
    monkeypatch.setattr(loops, "unanswered_seconds", unanswered(33.0))
    for bytes_told in (0, 10_000_000):
        with notices() as told, pytest.raises(PeerLost, match=r"rank 1 cannot be reached: .* for 50 s"):
            Pair(bytes_told=bytes_told).wait()
        assert told == []


def test_one_that_owes_nothing_may_take_its_time(monkeypatch):
    monkeypatch.setattr(loops, "unanswered_seconds", unanswered(29.0))
    with notices():
        Pair(lambda now, there: now == 20 * STEP_SECONDS and there.send(MESSAGE)).wait()


def test_a_long_pause_before_an_operation_is_no_silence(monkeypatch):
    """Each byte of the operation begins the time anew, whatever the kernel says of acknowledgments before it."""
    monkeypatch.setattr(loops, "unanswered_seconds", unanswered(500.0))
    Pair(trickle).wait()


class Pauses:
    """A clock that goes on by a second with every look, but for one look before which the process was stopped."""

    def __init__(self, stopped_at, stopped_seconds):
        self.now, self._stopped_at, self._stopped_seconds = 0.0, stopped_at, stopped_seconds

    def __call__(self):
        self.now += 1.0
        if self.now == self._stopped_at:
            self.now += self._stopped_seconds
        return self.now


@pytest.mark.parametrize("seconds", [60.0, 1e6])
def test_time_in_which_this_process_was_stopped_is_no_silence_of_its_peers(seconds):
    """All ranks of a suspended job or a paused container stop and continue together."""
    with notices() as told:
        silence = StallWatchdog(0, StallTimeouts(clock=Pauses(10.0, seconds)), unanswered(60.0))

        def look(times):
            for _ in range(times):
                silence.look([-1, 7], [1])

        look(25)
        assert told == []
        with pytest.raises(PeerLost, match=r"rank 1 cannot be reached: .* for 30 s"):
            look(10)


def test_a_pause_that_is_longer_than_a_short_timeout_is_no_silence():
    silence = StallWatchdog(0, StallTimeouts(timeout_seconds=10.0, clock=Pauses(10.0, 20.0)))
    for _ in range(11):
        silence.look([-1, 7], [1])
    with pytest.raises(PeerLost, match=r"rank 1 sent nothing for 10 s"):
        silence.look([-1, 7], [1])


def test_only_machines_that_the_operation_needs_are_asked():
    asked = []
    silence = StallWatchdog(0, StallTimeouts(clock=Time()), lambda rank: asked.append(rank) or 0.0)
    for _ in range(3):
        silence.look([-1, 7, -1, 7], [1])
    assert set(asked) == {1, 3}


class HastyGroup(Group):
    def mesh(self, rank):
        return Mesh(rank, self.sockets[rank], StallTimeouts(clock=Time()))


def test_a_group_is_told_who_is_missing():
    """Rank 1 has said its part; that it does not say the sums is because of rank 2."""
    with HastyGroup(3) as group, notices() as told:
        group.transports[1].begin(AllReduceMean(torch.zeros(10)))
        with pytest.raises(PeerLost, match=r"the group broke while rank 0 of 3 waited .* rank 2 sent nothing for"):
            group.transports[0].answer(AllReduceMean(torch.zeros(10)))
    assert [each.split(":")[0] for each in told] == ["rank 0 has waited 75 s for rank 2"]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (DirectAllReduce(), {0: [3], 1: [3], 2: [3]}),
        (RingAllReduce(), {0: [3], 1: [0], 2: [1]}),
        (HalvingDoubling(), {0: [2], 1: [3], 2: [3]}),
        (TreeAllReduce(), {0: [1], 1: [3], 2: [0]}),
        (HierarchicalAllReduce(per_node=2), {0: [2], 1: [3], 2: [3]}),
    ],
    ids=repr,
)
def test_following_whom_each_waits_for_leads_to_the_one_that_is_frozen(table, named):
    with Group(4, table) as group:
        for transport in group.transports[:3]:
            transport.begin(AllReduceMean(torch.zeros(1_000_000)))
        for _ in range(20):
            assert all(mesh._run(0, loops.TURN_MILLISECONDS) == loops.NOT_YET for mesh in group.meshes[:3])
        assert {rank: group.meshes[rank]._waits_for(0)[1] for rank in range(3)} == named


def test_the_environment_reports_how_long(monkeypatch):
    for text, seconds in (("", 1800.0), ("3600", 3600.0), ("inf", float("inf"))):
        monkeypatch.setenv("GOSSAMER_TIMEOUT", text)
        assert requested_timeouts().timeout_seconds == seconds


@pytest.mark.parametrize("text", ["an hour", "0", "-1", "nan"])
def test_an_invalid_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("GOSSAMER_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"GOSSAMER_TIMEOUT={text} is not a number of seconds above 0"):
        requested_timeouts()


def test_the_loops_return_in_time_though_something_always_comes():
    here, there = socket.socketpair()
    here.setblocking(False)
    room, over = torch.zeros(1000, dtype=torch.uint8), threading.Event()
    mesh = Mesh(0, [None, here])
    op = mesh.begin(straight_program((0, 0), (0, 1000), 7), [0, 0, 0, room.data_ptr()], room)

    def trickle():
        for byte in struct.pack("<4I", 0, 7, 0, 0) + bytes(900):
            there.send(bytes([byte]))
            if over.wait(0.005):
                return

    teller = threading.Thread(target=trickle)
    teller.start()
    began = time.monotonic()
    peer, error = ctypes.c_int32(), ctypes.c_int32()
    answer = loops._WAIT(mesh._handle, op, 100, ctypes.byref(peer), ctypes.byref(error))
    took = time.monotonic() - began
    over.set()
    teller.join()
    mesh.close()
    there.close()
    assert (answer, took < 2) == (loops.NOT_YET, True)

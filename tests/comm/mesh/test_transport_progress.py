"""Progress of the mesh while its communication thread is idle."""

import os
import threading
import time

import pytest
import torch
from support.mesh_group import Group

from gossamer.base.kernels.library import library
from gossamer.base.ops import AllReduceMean
from gossamer.comm.mesh import native_mesh
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import PeerLost
from gossamer.train.session.group_calls import leave

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")

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

    (comm_thread.beside() if beside else comm_thread).submit(work).wait()
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

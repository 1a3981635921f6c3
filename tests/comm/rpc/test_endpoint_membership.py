"""Peers that come and go: goodbyes, restarts, stopped and killed processes, forks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from support.rpc_endpoints import (
    DEAD_SECONDS,
    HERE,
    OTHER,
    SLACK_SECONDS,
    THERE,
    Open,
    asking_once,
    counting,
    next_of,
    push,
)

from gossamer.base.peer_ops import Arrived, Await, Elapsed, Peer, PeerJoined, PeerLeft, PeerScript, Receipt, Reply
from gossamer.errors import PeerLost


def test_who_says_goodbye_has_left_at_once(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    asking = worker.start(asking_once())
    server.answer(Reply(token=next_of(server, Arrived).token, answer=Receipt(version=1)))
    assert asking.wait(10).version == 1  # though nothing is read after it
    start = time.monotonic()
    worker.close()
    assert next_of(server, PeerLeft).peer == HERE
    assert time.monotonic() - start < 4  # of the 5 after which silence counts


def test_a_server_that_is_started_anew_hears_what_was_not_answered(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    port = server.address[1]
    worker.meet({THERE: server.address})
    asking = worker.start(asking_once(torch.arange(4.0)))
    first = next_of(server, Arrived)
    server.close()
    again = opened(THERE, port=port)
    second = next_of(again, Arrived)
    assert torch.equal(second.op.payload[0], first.op.payload[0])
    again.answer(Reply(token=second.token, answer=Receipt(version=8)))
    assert asking.wait(10).version == 8
    assert [type(worker.answer(Await())) for _ in range(3)] == [PeerJoined, PeerLeft, PeerJoined]


def test_an_answer_for_a_life_that_ended_does_not_reach_the_next(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    old = next_of(server, Arrived)
    worker.close()
    again = opened(HERE)
    again.meet({THERE: server.address})
    asking = again.start(asking_once())
    new = next_of(server, Arrived)
    server.answer(Reply(token=old.token, answer=Receipt(version=-7)))
    server.answer(Reply(token=new.token, answer=Receipt(version=1)))
    server.answer(Reply(token=new.token, answer=Receipt(version=-7)))
    assert asking.wait(10).version == 1


@pytest.mark.parametrize("heartbeat_seconds", [None, 100.0], ids=["beats", "silent"])
def test_who_computes_for_long_is_still_here_as_long_as_its_heart_beats(
    opened: Open, heartbeat_seconds: float | None
) -> None:
    server = opened(THERE, dead_after_seconds=0.3)
    worker = opened(HERE, dead_after_seconds=0.3, heartbeat_seconds=heartbeat_seconds)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    next_of(server, Arrived)
    heard = server.answer(Await(until=time.monotonic() + 0.7))
    assert isinstance(heard, Elapsed if heartbeat_seconds is None else PeerLeft)


def forked(work: Callable[[], object]) -> int:
    """The number of a child that does this and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_promise_4_who_is_stopped_or_killed_is_missed_in_time_and_not_before(opened: Open) -> None:
    server = opened(THERE, dead_after_seconds=DEAD_SECONDS)

    def ask() -> None:
        worker = opened(HERE, dead_after_seconds=DEAD_SECONDS)
        worker.meet({THERE: server.address})
        worker.answer(push(0, torch.ones(1), within_seconds=None))

    child = forked(ask)
    try:
        next_of(server, Arrived)
        os.kill(child, signal.SIGSTOP)
        pause = server.answer(Await(until=time.monotonic() + DEAD_SECONDS / 2))
        assert isinstance(pause, Elapsed)
        os.kill(child, signal.SIGCONT)
        assert isinstance(server.answer(Await(until=time.monotonic() + DEAD_SECONDS)), Elapsed)
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            start = time.monotonic()
            os.kill(child, blow)
            left = next_of(server, PeerLeft)
            assert DEAD_SECONDS / 2 < left.moment - start < DEAD_SECONDS + SLACK_SECONDS
            if blow == signal.SIGSTOP:
                os.kill(child, signal.SIGCONT)
                assert next_of(server, PeerJoined).peer == HERE
                next_of(server, Arrived)  # it says again what was not answered
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_closing_frees_everything_and_everyone(opened: Open) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address, OTHER: ("127.0.0.1", 9)})
    handles = [worker.start(asking_once()), server.start(_awaiting())]
    unheard = worker.start(_asking_to(OTHER))
    next_of(worker, PeerJoined)
    for endpoint in (worker, server):
        endpoint.close()
    for handle in (*handles, unheard):
        with pytest.raises(PeerLost, match="was closed"):
            handle.wait(0)
    with pytest.raises(PeerLost, match="was closed"):
        worker.answer(push(0, torch.ones(1)))
    assert (descriptors(), threading.active_count()) == (before, threads)
    worker.close()


def _awaiting() -> PeerScript:
    while True:
        yield Await(until=time.monotonic() + 100)


def _asking_to(peer: Peer) -> PeerScript:
    yield push(0, torch.ones(1), to=peer, within_seconds=None)


def test_a_forked_child_says_nothing_and_holds_nothing(opened: Open) -> None:
    before = _sockets()
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    worker.answer(push(0, torch.ones(1)))
    reading, writing = os.pipe()
    sockets = _sockets() - before

    def ask() -> None:
        try:
            worker.answer(push(1, torch.ones(1)))
        except PeerLost as lost:
            os.write(writing, f"{len(_sockets() & sockets)} {lost}".encode())
        worker.close()

    os.waitpid(forked(ask), 0)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert len(sockets) >= 8
    assert said.startswith("0 The endpoint of worker 1 was closed")
    assert worker.answer(push(1, torch.ones(1))).version == 2
    assert worker.statistics()[THERE].reconnects == 0


def _sockets() -> set[str]:
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in names if name.startswith("socket:")}


@pytest.mark.parametrize("gone_when_closed", [True, False])
def test_a_connection_that_breaks_may_count_as_gone_at_once(opened: Open, gone_when_closed: bool) -> None:
    """And who lives is back at once."""
    server, worker = opened(THERE, gone_when_closed=gone_when_closed), opened(HERE)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    next_of(server, Arrived)
    (connection,) = worker._dispatcher._connections.connections
    connection.sock.shutdown(socket.SHUT_RDWR)
    kinds = [type(server.answer(Await(until=time.monotonic() + 2.0))) for _ in range(2)]
    assert kinds == ([PeerLeft, PeerJoined] if gone_when_closed else [Arrived, Elapsed])

"""Endpoints in virtual time: messages, events, timeouts and ends, as those over sockets have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Arrived,
    AtOnce,
    Await,
    Elapsed,
    Peer,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.network import read_network
from gossamer.errors import PeerLost
from gossamer.plan.simulate.peer_network import PeerNetwork, VirtualEndpoint, VirtualScript

A, B, SERVED = Peer(WORKER, 0), Peer(WORKER, 1), Peer(SERVER, 0)


class Endpoints:
    """Endpoints on hosts with a line of 8 Mbit/s and a round trip of one second; the clock runs while one waits."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        network = read_network("8mbit,1s", 3)
        self.network = PeerNetwork(self.clock, lambda: network, lambda peer: 2 if peer.kind == SERVER else peer.number)

    def open(self, peer: Peer) -> VirtualEndpoint:
        return self.network.endpoint(peer, self._block)

    def _block(self, over: Callable[[], bool], until: float) -> None:
        while not over() and self.clock.next_moment <= until and self.clock.run_next():
            pass


def serve(seen: list[Any], answers: int = 10**9) -> PeerScript:
    """Note all events, and answer so many requests."""
    while True:
        event = yield Await()
        seen.append(event)
        if isinstance(event, Arrived) and answers:
            answers -= 1
            answer = Receipt(version=1) if isinstance(event.op, Push) else Pulled(version=2)
            yield Reply(token=event.token, answer=answer)


def push(nbytes: int = 4, **options: Any) -> Push:
    return Push(to=SERVED, key="key", stamp=Stamp(0, 0), payload=(torch.ones(nbytes // 4),), **options)


def test_a_request_and_its_answer_take_a_round_trip_and_the_bytes() -> None:
    there, seen = Endpoints(), list[Any]()
    there.open(SERVED).start(serve(seen))
    me = there.open(A)
    assert me.answer(push()) == Receipt(version=1)
    assert there.clock.now == pytest.approx(1.0, rel=0.01)
    began = there.clock.now
    me.answer(push(4_000_000))
    assert there.clock.now - began > 1.0 + 4.0
    assert me.statistics()[SERVED].payload_bytes_sent == 4 + 4_000_000
    assert [type(event) for event in seen] == [PeerJoined, Arrived, Arrived]


def test_a_receiver_keeps_the_bytes_that_were_sent() -> None:
    there, seen = Endpoints(), list[Any]()
    there.open(SERVED).start(serve(seen))
    op = push()
    there.open(A).answer(op)
    op.payload[0].zero_()  # the sender may reuse its tensors after the receipt
    assert seen[-1].op.payload[0].item() == 1.0


def test_answers_of_several_requests_are_in_their_order() -> None:
    there = Endpoints()
    there.open(SERVED).start(serve([]))
    me = there.open(A)
    found = me.answer(AtOnce((push(4_000_000), Pull(of=SERVED, key="key"))))
    assert [type(answer) for answer in found] == [Receipt, Pulled]
    assert me.answer(AtOnce(())) == []


def test_a_request_without_an_answer_ends_after_its_time() -> None:
    there = Endpoints()
    there.open(SERVED).start(serve([], answers=0))
    me = there.open(A)
    with pytest.raises(PeerLost, match="did not answer in time"):
        me.answer(push(within_seconds=3.0))
    assert there.clock.now == 3.0
    with pytest.raises(TimeoutError):
        me.start(iter_of(push())).wait(2.0)


def iter_of(op: Any) -> PeerScript:
    return (yield op)


def test_time_elapses_for_a_script_that_waits_for_an_event() -> None:
    there = Endpoints()
    me = there.open(A)
    assert me.answer(Await(until=-1.0)) == Elapsed(moment=0.0)
    assert me.answer(Await(until=7.0)) == Elapsed(moment=7.0)


def test_messages_to_a_peer_that_has_not_started_wait_for_it() -> None:
    there, seen = Endpoints(), list[Any]()
    asked = there.open(A).start(iter_of(push()))
    there.clock.run(until=5.0)
    assert not asked.landed()
    there.open(SERVED).start(serve(seen))
    assert asked.wait() == Receipt(version=1)


def test_the_end_of_an_endpoint_ends_its_scripts_and_informs_connected_peers() -> None:
    there, seen = Endpoints(), list[Any]()
    there.open(SERVED).start(serve(seen))
    me, other = there.open(A), there.open(B)
    me.answer(push())
    waiting = me.start(iter_of(Await()))
    assert isinstance(waiting.wait(), PeerJoined)
    waiting = me.start(iter_of(Await()))
    me.close()
    with pytest.raises(PeerLost, match="was closed"):
        waiting.wait()
    with pytest.raises(PeerLost, match="was closed"):
        me.answer(push())
    other.answer(push())
    assert [event.peer for event in seen if isinstance(event, PeerLeft)] == [A]


def test_an_error_of_a_script_is_raised_where_it_is_awaited() -> None:
    def broken() -> PeerScript:
        yield Await(until=1.0)
        raise ValueError("broken")

    running: VirtualScript = Endpoints().open(A).start(broken())
    with pytest.raises(ValueError, match="broken"):
        running.wait()

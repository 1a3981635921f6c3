"""Connections that break: asks are resent, half-open connections are replaced, and nothing is counted twice."""

from __future__ import annotations

import random
import socket
import time
from contextlib import ExitStack

import pytest
import torch
from support.proxy import between
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
from torch import Tensor

from gossamer.base.peer_ops import Arrived, AtOnce, PeerEvent, PeerJoined, PeerLeft, PeerScript, Pull, Receipt, Reply
from gossamer.comm.rpc.tls_sockets import resolve_address
from gossamer.comm.rpc.unanswered_requests import PeerState
from gossamer.errors import ConnectError, PeerLost


def test_a_word_cut_in_its_middle_is_said_again(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    heard: list[PeerEvent] = []
    server.start(counting(heard))
    with between(server.address, [300_000, 30, 500_000]) as proxy:
        worker.meet({THERE: proxy.address})
        receipt = worker.answer(push(0, torch.arange(250_000)))
        assert receipt.payload[0].item() == float(torch.arange(250_000).double().sum().float())
        assert proxy.connections == 4
        assert len([event for event in heard if isinstance(event, Arrived)]) == 1
        assert len([event for event in heard if isinstance(event, (PeerJoined, PeerLeft))]) == 1
        assert worker.statistics()[THERE].reconnects == 2


def test_a_peer_that_does_not_say_it_again_waits_in_vain(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(peer_state: PeerState) -> None:
        peer_state._outgoing.clear()

    monkeypatch.setattr(PeerState, "resend_all", forget)
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    with between(server.address, [300_000]) as proxy:
        worker.meet({THERE: proxy.address})
        with pytest.raises(PeerLost):
            worker.answer(push(0, torch.arange(250_000), within_seconds=0.5))


@pytest.mark.parametrize("seed", [1, 2])
def test_everything_is_done_once_however_often_connections_break(opened: Open, seed: int) -> None:
    draw = random.Random(seed)
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    cuts = [draw.randrange(1, 30_000) for _ in range(15)]
    with between(server.address, cuts) as proxy:
        worker.meet({THERE: proxy.address})
        for step in range(10):
            ops = tuple(push(3 * step + part, torch.full((1000,), step)) for part in range(3))
            worker.answer(AtOnce(ops))
        total = worker.answer(Pull(of=THERE, key=""))
        assert (total.version, total.payload[0].item()) == (30, 3 * 1000 * 45)
        assert proxy.connections > 2


def test_promise_6_a_half_open_connection_is_found_and_made_again(opened: Open) -> None:
    server = opened(THERE, dead_after_seconds=DEAD_SECONDS)
    worker = opened(HERE, dead_after_seconds=DEAD_SECONDS)
    with between(server.address) as proxy:
        worker.meet({THERE: proxy.address})
        asking = worker.start(asking_once())
        arrived = next_of(server, Arrived)
        server.answer(Reply(token=arrived.token, answer=Receipt(version=1)))
        asking.wait(10)
        next_of(worker, PeerJoined)
        proxy.hold_all()
        start = time.monotonic()
        for end in (server, worker):
            assert next_of(end, PeerLeft).moment - start < DEAD_SECONDS + SLACK_SECONDS
        asking = worker.start(asking_once())
        proxy.heal()
        assert next_of(server, PeerJoined).peer == HERE
        server.answer(Reply(token=next_of(server, Arrived).token, answer=Receipt(version=2)))
        assert asking.wait(10).version == 2


def test_a_connection_that_breaks_while_somebody_waits_in_flight_is_replaced(opened: Open) -> None:
    server, worker = opened(THERE, dead_after_seconds=0.3), opened(HERE, dead_after_seconds=0.3)
    server.start(counting())
    with between(server.address) as proxy:
        worker.meet({THERE: proxy.address})
        worker.answer(push(0, torch.ones(1)))
        proxy.hold()
        start = time.monotonic()
        assert worker.answer(push(1, torch.ones(2**18))).version == 2
        assert time.monotonic() - start < 0.3 + SLACK_SECONDS


def test_a_peer_that_does_not_read_holds_up_nobody_else_and_gives_memory_back(opened: Open) -> None:
    slow, quick = opened(THERE), opened(OTHER)
    worker = opened(HERE, queue_bytes=2**21)
    slow.start(counting())
    quick.start(counting())
    with between(slow.address) as proxy:
        worker.meet({THERE: proxy.address, OTHER: quick.address})
        worker.answer(push(0, torch.ones(1)))
        proxy.hold_all()
        payloads = [torch.ones(2**20) for _ in range(6)]
        stuck = [worker.start(_asking_of(step + 1, payload)) for step, payload in enumerate(payloads)]
        for step in range(20):
            assert worker.answer(push(step, torch.ones(2**10), to=OTHER)).version == step + 1
        lost = payloads[0].clone()
        with pytest.raises(PeerLost):
            worker.answer(push(99, lost, within_seconds=0.05))
        lost.fill_(float("nan"))
        assert not any(handle.landed() for handle in stuck)
        proxy.heal()
        for handle in stuck:
            handle.wait(20)
        assert worker.answer(Pull(of=THERE, key="")).payload[0].item() in (1 + 6 * 2**20, 1 + 7 * 2**20)
        assert worker.statistics()[THERE].blocked_seconds > 0
        assert worker.statistics()[OTHER].blocked_seconds == 0


def _asking_of(step: int, payload: Tensor) -> PeerScript:
    return (yield push(step, payload))


def test_a_peer_that_has_moved_is_dialed_where_it_is_now(opened: Open) -> None:
    """Where it was, nothing is accepted or refused any more."""
    server, worker = opened(THERE), opened(HERE, dead_after_seconds=DEAD_SECONDS)
    server.start(counting())
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, ExitStack() as full:
        for _ in range(3):
            filling = full.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(deaf.getsockname())
        worker.meet({THERE: deaf.getsockname()})
        asking = worker.start(asking_once())
        start = time.monotonic()
        worker.meet({THERE: server.address})
        assert asking.wait(10).version == 1
        assert time.monotonic() - start < DEAD_SECONDS + SLACK_SECONDS


def test_names_are_looked_up_where_they_are_listened_to() -> None:
    assert resolve_address(("localhost", 7)) == ("localhost", ("127.0.0.1", 7))
    assert resolve_address(("::1", 7)).address == ("::1", 7)


def test_nobody_knows_where_it_is(opened: Open) -> None:
    with pytest.raises(ConnectError, match=r"'no-such-machine\.invalid' cannot be resolved"):
        opened(HERE).meet({THERE: ("no-such-machine.invalid", 1)})

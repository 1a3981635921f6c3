"""Peers in virtual time with literal moments: short scripts, what they heard, and fates of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gossamer.base.peer_ops import (
    Answer,
    Arrived,
    Await,
    Peer,
    PeerEvent,
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
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Fault, Link, VirtualNetwork

SERVER, ONE, TWO = Peer("server", 0), Peer("worker", 0), Peer("worker", 1)
HALF = VirtualNetwork(round_trip_seconds=0.5, bits_per_second=64.0)
FOUR, TWO_NUMBERS = (torch.arange(4.0),), (torch.arange(2.0),)


def push(step: int = 0, to: Peer = SERVER, within_seconds: float | None = None) -> Push:
    return Push(to=to, key="w", stamp=Stamp(0, step), payload=FOUR, within_seconds=within_seconds)


def answer_to(op: Push | Pull) -> Answer:
    return Receipt(version=7) if isinstance(op, Push) else Pulled(version=7, payload=TWO_NUMBERS)


def server(log: list[Any] | None = None) -> Callable[[], PeerScript]:
    """Answers everything at once, and writes down whom it heard when."""
    log = [] if log is None else log

    def script() -> PeerScript:
        while True:
            heard = yield Await()
            log.append(line(heard))
            if isinstance(heard, Arrived):
                yield Reply(token=heard.token, answer=answer_to(heard.op))

    return script


def line(heard: PeerEvent) -> tuple[Any, ...]:
    """(moment, "PeerJoined" | "PeerLeft", peer), (moment, "Elapsed") or (moment, "Arrived", sender, step)."""
    match heard:
        case Arrived(sender=sender, op=Push(stamp=stamp)):
            return heard.moment, "Arrived", sender, stamp.step
        case PeerJoined(peer=peer) | PeerLeft(peer=peer):
            return heard.moment, type(heard).__name__, peer
    return heard.moment, type(heard).__name__


def arrivals(log: list[Any]) -> list[Any]:
    return [(entry[0], *entry[2:]) for entry in log if entry[1] == "Arrived"]


def comings(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry[1] in ("PeerJoined", "PeerLeft")]


def saying(*ops: Any) -> Callable[[], PeerScript]:
    """Issues one op after the other, or computes for so many seconds; returns (moment, answer) of each op."""

    def script() -> PeerScript:
        heard = []
        for op in ops:
            if isinstance(op, float):
                yield from compute(op)
            else:
                answer = yield op
                heard.append(((yield from compute(0)), answer))
        return heard

    return script


def idle(seconds: float) -> Callable[[], PeerScript]:
    return lambda: compute(seconds)


def moments(trace: Trace, peer: Peer = ONE) -> list[float]:
    return [moment for moment, _ in trace.result(peer)]


def over(faults: Iterable[Fault] = (), **fields: Any) -> VirtualNetwork:
    return VirtualNetwork(**({"round_trip_seconds": 0.5, "faults": tuple(faults)} | fields))


def fates(*seconds: tuple[float, ...]) -> Any:
    """What becomes of the messages, in the order in which they leave; the later ones arrive after a second."""
    left = iter(seconds)
    return patch.object(Link, "delivery_delays", lambda *_: next(left, (1.0,)))


def count(seed: int, once: bool, idle_seconds: float = 0.0) -> tuple[int, Trace]:
    """Three workers push 8 times each over a bad network to a server that counts, and remembers what it counted."""
    counted: dict[Stamp, int] = {}
    done = [0, 0, 0]
    total = 0

    def counter() -> PeerScript:
        nonlocal total
        while True:
            heard = yield Await()
            if isinstance(heard, Arrived):
                assert isinstance(heard.op, Push)
                stamp = heard.op.stamp
                if not once or stamp not in counted:
                    total += int(heard.op.payload[0].sum())
                counted[stamp] = total
                yield Reply(token=heard.token, answer=Receipt(version=total))

    def worker(number: int) -> Callable[[], PeerScript]:
        def script() -> PeerScript:
            while done[number] < 8:
                yield from compute(0.05)
                yield Push(to=SERVER, key="n", stamp=Stamp(number, done[number]), payload=(torch.ones(1),))
                done[number] += 1
            yield from compute(idle_seconds)

        return script

    scripts = {SERVER: counter, **{Peer("worker", number): worker(number) for number in range(3)}}
    trace = simulate_peers(scripts, VirtualNetwork.random(seed, list(scripts), 1.0), seed, keep=True)
    return total, trace


Twin = tuple[Any, str, Any, Callable[[], None]]  # where, name, its broken replacement, and the check that notices


def expect_noticed(where: Any, what: str, broken: Any, check: Callable[[], None]) -> None:
    with patch.object(where, what, broken), pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def nothing(*_: Any) -> None:
    return None

"""Endpoints on loopback with short texts, a server that counts, and waits that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Arrived,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials

HERE, THERE, OTHER = Peer(WORKER, 1), Peer(SERVER, 0), Peer(SERVER, 1)
TOKEN = bytes(range(32))
DEAD_SECONDS = 0.5
SLACK_SECONDS = 2.0  # of a busy machine; who never noticed would wait for far longer
Open = Callable[..., TcpEndpoint]


def counting(heard: list[PeerEvent] | None = None) -> PeerScript:
    """A server that adds up every contribution once, whoever brings it."""
    total, taken = torch.zeros(1), set[Stamp]()
    while True:
        event = yield Await()
        if heard is not None:
            heard.append(event)
        match event:
            case Arrived(token=token, op=Push(stamp=stamp, payload=payload)):
                if stamp not in taken:
                    total = total + payload[0].double().sum()
                taken.add(stamp)
                yield Reply(token=token, answer=Receipt(version=len(taken), payload=(total,)))
            case Arrived(token=token, op=Pull()):
                yield Reply(token=token, answer=Pulled(version=len(taken), payload=(total,), about="total"))


def push(step: int, payload: Tensor, to: Peer = THERE, within_seconds: float | None = 20.0) -> Push:
    return Push(to=to, key="", stamp=Stamp(1, step), payload=(payload,), within_seconds=within_seconds)


def next_of(endpoint: TcpEndpoint, kind: type[PeerEvent], within_seconds: float = 10.0) -> Any:
    until = time.monotonic() + within_seconds
    while True:
        heard = endpoint.answer(Await(until=until))
        assert not isinstance(heard, Elapsed), f"no {kind.__name__} within {within_seconds} s"
        if isinstance(heard, kind):
            return heard


def endpoint(me: Peer, *, port: int = 0, **other: Any) -> TcpEndpoint:
    """One of the run "run"; `other` replaces fields of its credentials and options."""
    options = EndpointOptions(**{name: other.pop(name) for name in vars(EndpointOptions()) if name in other}, port=port)
    settings = {"token": TOKEN, "run": "run", "recipe": "Dense()", "layout": "abcd", "largest_frame_bytes": 2**24}
    return TcpEndpoint(Credentials(me=me, **{**settings, **other}), options)


def asking_once(payload: Tensor | None = None) -> PeerScript:
    return (yield push(0, torch.ones(1) if payload is None else payload))


def wait_until(condition: Callable[[], bool], within_seconds: float = 10.0) -> None:
    until = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.01)

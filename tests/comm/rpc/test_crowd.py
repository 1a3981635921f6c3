"""Everyone asks everyone, both ends dial, and every way is cut again and again: each hears its own answers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import permutations

import pytest
import torch
from support.proxy import between

from gossamer.base.peer_ops import WORKER, Arrived, AtOnce, Await, Peer, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials

CROWD = [Peer(WORKER, number) for number in range(4)]
ROUNDS = 8


def echo() -> PeerScript:
    while True:
        event = yield Await()
        if isinstance(event, Arrived):
            assert isinstance(event.op, Push)
            yield Reply(token=event.token, answer=Receipt(version=event.op.stamp.step, payload=event.op.payload))


def ask_everyone(me: Peer, draw: random.Random) -> PeerScript:
    for step in range(ROUNDS):
        ops = tuple(
            Push(to=peer, key="", stamp=Stamp(me.number, step), payload=(torch.full((draw.randrange(60_000),), step),))
            for peer in CROWD
            if peer != me and draw.random() < 0.7
        )
        answers = yield AtOnce(ops)
        for op, answer in zip(ops, answers, strict=True):
            assert answer.version == step
            assert torch.equal(answer.payload[0], op.payload[0])
    return ROUNDS


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everyone_hears_its_own_answers_whatever_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    with ExitStack() as stack:
        ends = {
            me: stack.enter_context(
                TcpEndpoint(
                    Credentials(me=me, token=bytes(32), run="", largest_frame_bytes=2**21),
                    EndpointOptions(dead_after_seconds=2.0),
                )
            )
            for me in CROWD
        }
        for me, other in permutations(CROWD, 2):
            cuts = [draw.randrange(1, 400_000) for _ in range(draw.randrange(12))]
            way = stack.enter_context(between(ends[other].address, cuts))
            ends[me].meet({other: way.address})
        for end in ends.values():
            end.start(echo())
        asking = [
            end.start(ask_everyone(me, random.Random(f"{seed} {me} {number}")))
            for me, end in ends.items()
            for number in range(2)
        ]
        assert [handle.wait(30) for handle in asking] == [ROUNDS] * 8
        assert sum(traffic.reconnects for end in ends.values() for traffic in end.statistics().values()) > 10

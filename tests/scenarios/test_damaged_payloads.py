"""A payload that a peer sends damaged: the error names sender, tensor, step and compressor, over every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from laws.laws import in_threads
from support.direct_server import DirectServer
from support.mesh_group import Group
from support.rpc_endpoints import Open, endpoint

from gossamer.algorithms.compressors import Chain, Compressor, OneBit, TopK
from gossamer.algorithms.compressors.base import aggregate_finite
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.library import library
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, CollectiveOp, Payload
from gossamer.base.peer_ops import SERVER, WORKER, Await, Peer, PeerScript, Push
from gossamer.base.runner import run_script
from gossamer.base.transport import Transport
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import MalformedError

WORLD, STEP, UNTOUCHED = 3, 11, -7.0
TENSORS = Layout.of({"first": (64,), "second": (64,)})
COMPRESSORS = [Int8(block=16), OneBit(), OneBit(columns=True), TopK(density=0.5), Chain(TopK(density=0.5), Int8())]


def damaged(payload: Payload) -> Payload:
    """The last number of each floating-point tensor is none."""
    found = tuple(tensor.clone() for tensor in payload)
    for tensor in found:
        if tensor.is_floating_point() and tensor.numel():
            tensor.view(-1)[-1] = nan
    return found


class DamagingTransport:
    """Says other things than its rank."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.world, self.rank = inner, inner.world, inner.rank

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        assert isinstance(op, AllGather)
        return self._inner.begin(replace(op, payload=damaged(op.payload)))


@contextmanager
def simulated() -> Iterator[list[Transport]]:
    yield list(SimulatedGroup(WORLD, patience_seconds=20.0).transports)


@contextmanager
def meshed() -> Iterator[list[Transport]]:
    if library() is None:
        pytest.skip("the compiled loops are not there")
    with Group(WORLD) as group:
        yield group.transports


@pytest.mark.parametrize("transports", [simulated, meshed], ids=lambda each: each.__name__)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_promise_8_in_lock_step(transports: Callable[[], Any], compressor: Compressor) -> None:
    outs = [torch.full((128,), UNTOUCHED) for _ in range(WORLD)]

    def aggregate(transport: Transport) -> str:
        at = AggregationContext(step=STEP, rank=transport.rank, world=WORLD)
        x = FlatTensors(torch.randn(128), TENSORS)
        script = aggregate_finite(compressor, x, compressor.init(x, at), at, outs[transport.rank], lambda: None)
        with pytest.raises(MalformedError) as caught:
            run_script(script, DamagingTransport(transport) if transport.rank == 1 else transport)
        return str(caught.value)

    with transports() as group:
        said = in_threads(lambda rank: aggregate(group[rank]), WORLD)
    for text, out in zip(said, outs, strict=True):
        assert "rank 1" in text
        assert f"step {STEP}" in text
        assert repr(compressor) in text
        assert "'second'" in text
        assert bool((out == UNTOUCHED).all()), "something was written"


@pytest.fixture
def opened() -> Iterator[Open]:
    endpoints: list[TcpEndpoint] = []

    def open_(me: Peer) -> TcpEndpoint:
        endpoints.append(endpoint(me))
        return endpoints[-1]

    yield open_
    for each in endpoints:
        each.close()


def test_promise_8_on_the_way_to_a_server(opened: Open) -> None:
    """A server goes on: it refuses the push, and applies nothing of it."""
    world = DirectServer('ParameterServer("async", push=Int8())')
    before = [block.flat.clone() for block in world.shard.blocks]

    def serve() -> PeerScript:
        while True:
            event = yield Await()
            yield from world.policy.react(world.shard, event)

    pushed = replace(world.push(1, step=0), within_seconds=10.0)
    server, worker = opened(Peer(SERVER, pushed.to.number)), opened(Peer(WORKER, 1))
    server.start(serve())
    worker.meet({pushed.to: server.address})
    assert isinstance(pushed, Push)
    refused = worker.answer(replace(pushed, payload=damaged(pushed.payload))).about
    for named in ("rank 1", "step 0", "Int8(", "for tensor"):
        assert named in refused
    assert all(torch.equal(mine, block.flat) for mine, block in zip(before, world.shard.blocks, strict=True))
    assert "rank 1" not in worker.answer(pushed).about

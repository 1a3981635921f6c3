"""Elastic groups whose tensors lie on devices: staged meshes, one for each view, outlive a lost worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support import elastic_groups
from support.deferred_device import DeferredDevice
from support.elastic_groups import ElasticRun, Loss
from support.elastic_training import trained
from support.mesh_group import Always
from support.staged_group import small_chunks, staged
from support.stand_in_nccl import Incarnation, StandInGroup
from support.standalone_group import StandaloneGroup, connected

from gossamer.algorithms.collectives import DirectAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.comm.elastic import interrupted_operations
from gossamer.comm.elastic.interrupted_operations import handed_out
from gossamer.comm.elastic.value_transfer import Outgoing, broadcast_value, receive_values, send_values
from gossamer.comm.elastic.view_engines import ViewEngine
from gossamer.comm.mesh import device_transport
from gossamer.comm.mesh.device_transport import DeviceTransport
from gossamer.comm.mesh.engine_selector import EngineSelector
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.operations import MeshOperations
from gossamer.comm.mesh.staged_operations import StagedOperations
from gossamer.comm.mesh.standalone import MeshFallback
from gossamer.comm.mesh.transport import MeshTransport

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


class StagedView:
    """What an ElasticRun takes for a view's group: a mesh whose ranks have a device each."""

    devices: list[DeferredDevice]

    def __init__(self, world: int, _: float) -> None:
        self.world, sockets = world, connected(world)
        self.devices = [DeferredDevice(rank) for rank in range(world)]
        self.transports = [self._transport(rank, sockets[rank]) for rank in range(world)]

    def _transport(self, rank: int, sockets: Any) -> MeshTransport:
        operations = MeshOperations(Mesh(rank, sockets), Always(DirectAllReduce(), self.world))
        return MeshTransport(operations, MeshFallback(operations), staged(operations, self.devices[rank]))

    def leave(self) -> None:
        for each in self.transports:
            each.close("the group was broken off")


class EngineView(StagedView):
    """Such a group with an engine between devices beside its mesh, which takes all that it serves."""

    def __init__(self, world: int, seconds: float) -> None:
        self.incarnation = Incarnation(world)
        self.groups = [StandInGroup(self.incarnation, rank, []) for rank in range(world)]
        super().__init__(world, seconds)

    def _transport(self, rank: int, sockets: Any) -> Any:
        mesh = super()._transport(rank, sockets)
        engine = ViewEngine(self.groups[rank], self.world, mesh.peers, seconds=30.0)
        return DeviceTransport(mesh, engine, lambda links: EngineSelector(((0.0, 0.0), (1.0, 1.0)), ("",) * self.world))


@contextmanager
def on_devices(kind: type[StagedView] = StagedView) -> Iterator[list[Any]]:
    made: list[StagedView] = []

    def view(world: int, seconds: float) -> StagedView:
        made.append(kind(world, seconds))
        return made[-1]

    with small_chunks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_groups, "SimulatedGroup", view)
        try:
            yield made
        finally:
            for each in made:
                each.leave()


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "LocalSGD(2) + TopK(0.1)"])
@pytest.mark.parametrize("op", [3, 6])
def test_survivors_of_a_loss_continue_with_the_bits_that_they_have_without_devices(recipe: str, op: int) -> None:
    loss = Loss(victim=1, op=op)
    simulated = ElasticRun(3, loss)(partial(trained, recipe))
    with on_devices() as views:
        results = ElasticRun(3, loss)(partial(trained, recipe))
    assert len(views) >= 2, "nobody was lost"
    assert any(device.pinned_bytes for view in views for device in view.devices), "nothing was staged"
    first, _, third = results
    assert torch.equal(first.agreed, third.agreed)
    assert results[1] is None
    assert torch.equal(first.agreed, simulated[0].agreed)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "LocalSGD(2) + TopK(0.1)"])
@pytest.mark.parametrize("op", [3, 6])
def test_with_an_engine_between_devices_survivors_have_the_same_bits(
    recipe: str, op: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transport, "is_here", lambda tensors: False)
    loss = Loss(victim=1, op=op)
    simulated = ElasticRun(3, loss)(partial(trained, recipe))
    with on_devices(EngineView) as views:
        results = ElasticRun(3, loss)(partial(trained, recipe))
    assert any(view.incarnation.said for view in views[1:]), "no view after the first had an engine"
    assert results[1] is None
    assert torch.equal(results[0].agreed, results[2].agreed)
    assert torch.equal(results[0].agreed, simulated[0].agreed)


def test_a_state_goes_from_a_device_to_a_member_that_has_none() -> None:
    """The donor copies by its device, the others in their own memory: all cut it alike."""
    value = ["text", (torch.arange(700.0), torch.arange(5))]
    with small_chunks(), StandaloneGroup(3, "direct") as group:
        device = DeferredDevice()
        for rank, each in enumerate(group.transports):
            operations = each._operations
            each._staged = staged(operations, device) if rank == 1 else StagedOperations(operations, everything=True)
        heard = group.all(lambda rank: broadcast_value(group.transports[rank], 1, value if rank == 1 else None))

        def act(rank: int) -> Any:
            if rank != 1:
                return receive_values(group.transports[rank], None, [[1]])[1].values[0]
            send_values(group.transports[rank], None, Outgoing(1, [(value, [1])]), [0, 2])
            return value

        told = group.all(act)
    for found in (*heard, *told):
        assert torch.equal(found[1][0], value[1][0])
        assert torch.equal(found[1][1], value[1][1])


def test_answers_that_others_gave_lie_where_the_operation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(interrupted_operations, "moved", lambda payload, like: moved.append((payload, like)) or payload)
    mine, theirs = (torch.zeros(2),), (torch.ones(2),)
    op = Coalesced((AllReduceMean(torch.zeros(3)), AllGather(mine)))
    mean, heard = handed_out(op, [torch.ones(3), [mine, theirs]])
    assert torch.equal(mean, torch.ones(3))
    assert heard == [mine, theirs]
    assert [like for _, like in moved] == [mine, mine]

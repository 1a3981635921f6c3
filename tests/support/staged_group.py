"""Ranks in threads whose tensors lie on devices that are not there: groups of support.mesh_group, staged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support.deferred_device import DeferredDevice
from support.mesh_group import Group

from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.staged_operations import StagedOperations
from gossamer.comm.mesh.transport import MeshTransport
from gossamer.comm.staging import chunk_tables
from gossamer.comm.staging.staging_area import StagingArea


def stage(
    group: Group, capacity_bytes: int = 2**16, pace: float = 0.3, devices: Sequence[DeferredDevice] = ()
) -> Sequence[DeferredDevice]:
    """Stage a group's operations through a device at each rank. Return the devices; without any, new ones."""
    devices = devices or [DeferredDevice(rank, pace) for rank in range(group.world)]
    group.transports = [
        MeshTransport(each._operations, each._fallback, staged(each._operations, device, capacity_bytes))
        for each, device in zip(group.transports, devices, strict=True)
    ]
    return devices


def staged(operations: object, device: DeferredDevice, capacity_bytes: int = 2**16) -> StagedOperations:
    return StagedOperations(operations, StagingArea(lambda _: device, capacity_bytes), everything=True)  # type: ignore[arg-type]


@contextmanager
def small_chunks(chunk_bytes: int = 256, slot_bytes: int = 1024) -> Iterator[None]:
    """Cut small tensors in many chunks; fill fresh memory with what no test sends; and look at what the loops use."""
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_tables, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(chunk_tables, "SLOT_BYTES", slot_bytes)
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextmanager
def watched(devices: Callable[[int], DeferredDevice]) -> Iterator[None]:
    """Raise Misused where the loops are given memory that a copy still reads or writes. devices: by rank."""
    begin = Mesh.begin

    def checked(self: Mesh, program: object, places: object, keep: object, sources: object = None) -> int:
        for place, nbytes in zip(places, program.sizes, strict=True):  # type: ignore[call-overload,attr-defined]
            if nbytes:
                devices(self.rank).check_unused(place, nbytes)
        return begin(self, program, places, keep, sources)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "begin", checked)
        yield

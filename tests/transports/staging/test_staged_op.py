"""Staged operation: copies go on while chunks travel, in an order that no device's pace changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.deferred_device import DeferredDevice
from torch import Tensor

from gossamer.transports.staging import staged_op
from gossamer.transports.staging.device_copies import Way
from gossamer.transports.staging.staged_op import Chunk, StagedOp
from gossamer.transports.staging.staging_area import StagingArea

SIZE, COUNT = 64, 6


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_op, "TRAVELING", 2)


class Noting(DeferredDevice):
    """A device that notes what it is asked for."""

    def __init__(self, pace: float) -> None:
        super().__init__(pace=pace)
        self.noted: list[str] = []

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        self.noted.append(f"copy {way}")
        super().copy(way, target, source)


def run(pace: float, capacity_bytes: int = 2**12) -> tuple[list[str], Tensor, Tensor]:
    """What happened, in order; what went in, and what came out: everything plus one."""
    device = Noting(pace)
    source = torch.arange(SIZE * COUNT).to(torch.uint8)
    out = torch.full_like(source, 99)

    def chunk(number: int) -> Chunk:
        part = slice(number * SIZE, (number + 1) * SIZE)

        def begin(slot: Tensor) -> Callable[[], None]:
            device.noted.append(f"begin {number}")
            device.check_unused(slot.data_ptr(), SIZE)
            slot += 1

            def wait() -> None:
                device.noted.append(f"wait {number}")

            return wait

        return Chunk(SIZE, [(source[part], 0)], begin, [(out[part], 0)])

    op = StagedOp(StagingArea(lambda _: device, capacity_bytes), list(map(chunk, range(COUNT))), torch.device("cpu"))
    device.noted.append("begun")
    op.wait()
    device.synchronize()
    return device.noted, source, out


def travels(noted: list[str]) -> list[str]:
    return [each for each in noted if not each.startswith("copy")]


ORDER = [
    "begin 0",
    "begin 1",
    "begun",
    "wait 0",
    "begin 2",
    "wait 1",
    "begin 3",
    "wait 2",
    "begin 4",
    "wait 3",
    "begin 5",
    "wait 4",
    "wait 5",
]


@pytest.mark.parametrize("pace", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("capacity_bytes", [SIZE, 3 * SIZE, 2**12])
def test_connections_see_one_order_whatever_the_pace_and_the_memory(pace: float, capacity_bytes: int) -> None:
    noted, source, out = run(pace, capacity_bytes)
    assert travels(noted) == ORDER
    assert torch.equal(out, source + 1)


def test_the_next_chunk_is_copied_while_one_travels() -> None:
    noted, _, _ = run(1.0)
    for number in range(COUNT - 1):
        at = noted.index(f"begin {number}")
        assert noted[: noted.index(f"wait {number}")].count("copy to host") >= number + 2
        assert noted[at + 1 :].count("copy to host") <= COUNT - number - 1
    assert noted.index("copy to device") < noted.index("wait 1")


def test_where_memory_is_short_chunks_wait_for_it_and_nothing_stops() -> None:
    """A slot serves again only when what was in it has arrived: with three of them, of six chunks."""
    device = DeferredDevice(pace=0.0)
    area = StagingArea(lambda _: device, 3 * SIZE)
    for _ in range(4):
        source, out = torch.arange(SIZE).to(torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
        StagedOp(area, [Chunk(SIZE, [(source, 0)], lambda _: lambda: None, [(out, 0)])] * 3, torch.device("cpu")).wait()
        assert torch.equal(out, source)
    assert device.pinned_bytes == 3 * SIZE

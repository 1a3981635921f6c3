"""Staged operation: copies go on while chunks travel, and while others' are made, in an order that no pace changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.deferred_device import DeferredDevice
from torch import Tensor

from gossamer.comm.staging import staging_area
from gossamer.comm.staging.device_copies import Way
from gossamer.comm.staging.staging_area import Chunk, StagedOp, StagingArea

SIZE, COUNT = 64, 6


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_area, "TRAVELING", 2)


class Noting(DeferredDevice):
    """A device that notes what it is asked for."""

    def __init__(self, pace: float) -> None:
        super().__init__(pace=pace)
        self.noted: list[str] = []

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        self.noted.append(f"copy {way}")
        super().copy(way, target, source)

    def run(self, stream: str, number: int) -> None:
        if stream is Way.TO_HOST:
            self.noted.append(f"await {number // 2}")  # that many copies, each after what it waits for
        super().run(stream, number)


def chunks(device: Noting, source: Tensor, out: Tensor, name: str = "") -> list[Chunk]:
    """Of an operation that adds one to everything."""

    def chunk(number: int) -> Chunk:
        part = slice(number * SIZE, (number + 1) * SIZE)

        def begin(slot: Tensor) -> Callable[[], None]:
            device.noted.append(f"begin {name}{number}")
            device.check_unused(slot.data_ptr(), SIZE)
            slot += 1

            def wait() -> None:
                device.noted.append(f"wait {name}{number}")

            return wait

        return Chunk(SIZE, [(source[part], 0)], begin, [(out[part], 0)])

    return list(map(chunk, range(len(source) // SIZE)))


def run(pace: float, capacity_bytes: int = 2**12) -> tuple[list[str], Tensor, Tensor]:
    """What happened, in order; what went in, and what came out."""
    device = Noting(pace)
    source = torch.arange(SIZE * COUNT).to(torch.uint8)
    out = torch.full_like(source, 99)
    op = StagedOp(StagingArea(lambda _: device, capacity_bytes), chunks(device, source, out), torch.device("cpu"))
    wait = op.begin(lambda: "answered")
    device.noted.append("begun")
    assert wait() == "answered"
    device.synchronize()
    return device.noted, source, out


def travels(noted: list[str]) -> list[str]:
    return [each for each in noted if not each.startswith(("copy", "await"))]


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
        some = [Chunk(SIZE, [(source, 0)], lambda _: lambda: None, [(out, 0)])] * 3
        StagedOp(area, some, torch.device("cpu")).begin(lambda: None)()
        assert torch.equal(out, source)
    assert device.pinned_bytes == 3 * SIZE


TOGETHER = [
    *["copy to host"] * 4,
    *["await 1", "begin a0", "await 2", "begin a1", "copy to host"],
    *["await 3", "begin b0", "await 4", "begin b1", "copy to host"],
    *["wait a0", "copy to device", "await 5", "begin a2", "wait a1", "copy to device", "wait a2", "copy to device"],
    *["wait b0", "copy to device", "await 6", "begin b2", "wait b1", "copy to device", "wait b2", "copy to device"],
]


def check_together(capacity_bytes: int, expected: list[str]) -> None:
    """Two operations of three chunks, of a device that copies nothing before somebody waits for it."""
    device = Noting(pace=0.0)
    area = StagingArea(lambda _: device, capacity_bytes)
    sources = [device.computed(torch.arange(first, first + 3 * SIZE).to(torch.uint8)) for first in (0, 7)]
    outs = [torch.full_like(source, 99) for source in sources]
    ops = [
        StagedOp(area, chunks(device, source, out, name), torch.device("cpu"))
        for source, out, name in zip(sources, outs, "ab", strict=True)
    ]
    for wait in [op.begin(lambda: None) for op in ops]:
        wait()
    device.synchronize()
    assert device.noted == expected
    assert all(torch.equal(out, source + 1) for source, out in zip(sources, outs, strict=True))


def test_all_copies_are_begun_before_any_is_waited_for() -> None:
    check_together(2**12, TOGETHER)


def test_the_check_catches_copies_that_begin_with_their_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = StagedOp._copy_if_vacant
    monkeypatch.setattr(StagedOp, "_copy_if_vacant", lambda self: self._traveling and copy(self))
    with pytest.raises(AssertionError):
        check_together(2**12, TOGETHER)


def test_who_finds_no_memory_copies_when_its_turn_comes() -> None:
    """Memory for two chunks, which the first operation takes; the second's are copied elsewhere, one after another."""
    before = [
        *["copy to host"] * 2,
        *["await 1", "begin a0", "await 2", "begin a1"],
        *["copy to host", "await 3", "begin b0", "copy to host", "await 4", "begin b1"],
    ]
    after = [
        *["wait a0", "copy to device", "copy to host", "await 5", "begin a2"],
        *["wait a1", "copy to device", "wait a2", "copy to device"],
        *["wait b0", "copy to device", "copy to host", "await 6", "begin b2"],
        *["wait b1", "copy to device", "wait b2", "copy to device"],
    ]
    check_together(2 * SIZE, before + after)

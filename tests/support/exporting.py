"""Events to export, and destinations that misbehave."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gossamer import events
from gossamer.events import Attached, Event, Logged, Noticed, StepEnded
from gossamer.observe.exporters.points import Point


def attached(world: int = 2) -> Attached:
    return Attached(recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=world)


def step(number: int, seconds: float = 0.5, moment: float | None = None) -> StepEnded:
    return StepEnded(
        moment=number * seconds if moment is None else moment,
        step=number, seconds=seconds, waiting_seconds=0.1, bytes_sent=4e6,
    )  # fmt: skip


def logged(number: int, **values: float) -> Logged:
    return Logged(moment=number * 0.5, step=number, values=values)


ODD = {
    "train/loss": 0.25,
    'quote" back\\slash': -1.5,
    "new\nline": 3.0,
    "größe %": 4.0,
    "": 5.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "beyond float32": 1e300,
    "{label=x}": 0.0,
}
ODD_POINT = Point(1.7e9, 300, ODD)
MANY = {f"layer.{number}/norm": number / 8 for number in range(1000)}


@contextmanager
def noticed() -> Iterator[list[str]]:
    """What the user is told within the block."""
    said: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Noticed):
            said.append(event.message)

    end = events.subscribe(hear)
    try:
        yield said
    finally:
        end()


def disk_with_room_for(count: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """So many bytes can be written from now on; then the disk is full. Calling what it returns makes room."""
    write, left = os.write, [count]

    def full(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, bytes(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    return lambda: monkeypatch.setattr(os, "write", write)

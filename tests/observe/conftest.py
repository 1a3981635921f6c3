"""Fixtures of what is written while training goes on: a disk that runs full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Says how many bytes the disk still takes; None: all."""
    write, left = os.write, [None]

    def scarce(file: int, content: bytes) -> int:
        if left[0] is None:
            return write(file, content)
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", scarce)

    def say(count: int | None) -> None:
        left[0] = count

    return say

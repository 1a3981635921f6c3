"""Fixtures of what is written while training goes on: an empty store, and a disk that runs full."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gossamer.observe.telemetry import open_store


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An empty store of a run."""
    store = open_store(tmp_path / "run.sqlite")
    yield store
    store.close()


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

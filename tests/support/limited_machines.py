"""Bandwidth limits for the connections of a test, as if their peers were on other machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gossamer.comm.bandwidth import shared_buckets
from gossamer.comm.bandwidth.shared_buckets import BANDWIDTH, DOWN, UP, Bandwidth


@contextmanager
def limited(
    folder: Path, *, up: float | None = None, down: float | None = None, cap: int | None = None
) -> Iterator[Bandwidth]:
    """Limits in bits per second for all connections that are opened in the block; cap: in bytes."""
    made = Bandwidth.create(folder / "bandwidth")
    made.limit(UP, up)
    made.limit(DOWN, down)
    made.set_cap(cap)
    shared_buckets._opened.cache_clear()  # a test may get the folder of an earlier one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BANDWIDTH, str(folder / "bandwidth"))
        patch.setattr(shared_buckets, "is_local", lambda sock: False)
        yield made

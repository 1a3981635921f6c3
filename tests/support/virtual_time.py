"""Virtual time: a clock per thread for the measurement of compute times; each worker advances its own."""

from __future__ import annotations

import threading

import pytest

from gossamer.train.synchronizers import speed_balance


class VirtualTime(threading.local):
    now = 0.0


def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Let speeds be measured by the returned clock."""
    virtual = VirtualTime()
    monkeypatch.setattr(speed_balance, "now", lambda: virtual.now)
    return virtual

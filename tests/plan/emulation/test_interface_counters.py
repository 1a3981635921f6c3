from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.plan.emulation import interface_counters
from gossamer.plan.emulation.interface_counters import sent_bytes

TABLE = """Inter-|   Receive                 |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:   11      12    0    0    0     0          0         0    13      14    0    0    0     0       0          0
  eth0: 1000      10    0    0    0     0          0         0  5000      20    0    0    0     0       0          0
"""


def test_what_the_host_sent_is_counted_in_ip_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").write_text(TABLE)
    monkeypatch.setattr(interface_counters, "COUNTERS", tmp_path / "dev")
    assert sent_bytes(0) == 5000
    assert sent_bytes(14) == 5000 - 14 * 20

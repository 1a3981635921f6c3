"""Interface counters: bytes that the kernel counted, read from within a host."""

from __future__ import annotations

from pathlib import Path

from gossamer.plan.emulation.namespaces import INTERFACE

COUNTERS = Path("/proc/self/net/dev")
SENT_BYTES, SENT_PACKETS = 8, 9  # after eight columns of what was received


def sent_bytes(header_bytes: int) -> int:
    """IP bytes that this process's host has sent so far; header_bytes: what the counter has on top of each packet."""
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    columns = [int(column) for column in line.partition(":")[2].split()]
    return columns[SENT_BYTES] - header_bytes * columns[SENT_PACKETS]

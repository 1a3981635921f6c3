"""Shared buckets: the token buckets of kernels-src/bandwidth.hpp, in a file that all processes of a launcher map.

`current` opens the file that GOSSAMER_BANDWIDTH names; None without limits. A connection gets its Meter when it is
opened, so that connections without limits make no further call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

from gossamer.base import system
from gossamer.base.kernels.library import Count, Function, Pointer, are_built

BANDWIDTH = "GOSSAMER_BANDWIDTH"
UP, DOWN = 0, 1  # Way in kernels-src/bandwidth.hpp
NBYTES = 4096
NO_LIMIT = -1.0
UNSENT_BYTES = 2**17  # in the kernel's buffer of one connection: it sends them without regard to a new limit

_LIMIT = Function("gossamer_bandwidth_limit", Pointer, Count, ctypes.c_double, Count)
_CAP = Function("gossamer_bandwidth_cap", Pointer, Count)
_COUNTED = Function("gossamer_bandwidth_counted", Pointer, Count)
_ROOM = Function("gossamer_bandwidth_room", Pointer, Count, Count, Count)
_TRANSFER = Function("gossamer_bandwidth_transfer", Pointer, Count, Count, Count)

available = are_built


def current() -> Bandwidth | None:
    """The limits of this machine; None if its launcher has none."""
    path = os.environ.get(BANDWIDTH)
    return _opened(path) if path else None


@cache
def _opened(path: str) -> Bandwidth:
    return Bandwidth.open(Path(path))


class Bandwidth:
    """The buckets of one machine. Times are those of time.monotonic_ns.

    Args:
        memory: of NBYTES, zero at first. It stays mapped.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._memory)

    @classmethod
    def create(cls, path: Path) -> Bandwidth:
        """Make the file. Transfers wait until all limits and the cap are set."""
        with system.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as file:
            file.truncate(NBYTES)
            return cls(mmap.mmap(file.fileno(), NBYTES))

    @classmethod
    def open(cls, path: Path) -> Bandwidth:
        with system.open_file(path, os.O_RDWR) as file:
            return cls(mmap.mmap(file.fileno(), NBYTES))

    def limit(self, way: int, bits_per_second: float | None, now: int | None = None) -> None:
        """Set the limit of UP or DOWN; None for no limit. For the launcher only."""
        rate = NO_LIMIT if bits_per_second is None else bits_per_second / 8
        _LIMIT(self.address, way, rate, time.monotonic_ns() if now is None else now)

    def set_cap(self, counted_bytes: int | None) -> None:
        """Stop all transfers once `counted` reaches this; None for no cap."""
        _CAP(self.address, -1 if counted_bytes is None else counted_bytes)

    @property
    def counted(self) -> int:
        """Bytes on the wire in both directions so far, with headers and acknowledgments."""
        return _COUNTED(self.address, UP) + _COUNTED(self.address, DOWN)

    def counted_way(self, way: int) -> int:
        """The same, of UP or DOWN."""
        return _COUNTED(self.address, way)

    def room(self, way: int, ticket: int, now: int) -> int:
        """Bytes of payload that a connection with this ticket may transfer; below 1, minus the nanoseconds to wait."""
        return _ROOM(self.address, way, ticket, now)

    def transfer(self, way: int, nbytes: int, now: int) -> int:
        """Count a transfer of `nbytes` of payload, and return the connection's next ticket."""
        return _TRANSFER(self.address, way, nbytes, now)

    def meter(self, sock: socket.socket) -> Meter | None:
        """The meter of a connected socket; None between processes of one machine."""
        if is_local(sock):
            return None
        if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
        return Meter(self)


class Meter:
    """One connection's use of the buckets."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self._bandwidth = bandwidth
        self._tickets = [0, 0]

    def room(self, way: int) -> int:
        """Bytes that may be transferred now; 0 if the connection must wait."""
        return max(0, self._bandwidth.room(way, self._tickets[way], time.monotonic_ns()))

    def wait_seconds(self, *ways: int) -> float:
        """Seconds until one of these ways has room; 0 if one has."""
        now, wait = time.monotonic_ns(), inf
        for way in ways:
            wait = min(wait, max(0, -self._bandwidth.room(way, self._tickets[way], now)) / 1e9)
        return wait

    def transferred(self, way: int, nbytes: int) -> None:
        self._tickets[way] = self._bandwidth.transfer(way, nbytes, time.monotonic_ns())


def is_local(sock: socket.socket) -> bool:
    """Whether the peer is on this machine: no other machine has the same address."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # it was closed
        return True


def meter_of(sock: socket.socket) -> Meter | None:
    """The meter of a connected socket; None without limits, and between processes of one machine."""
    bandwidth = current()
    return None if bandwidth is None else bandwidth.meter(sock)

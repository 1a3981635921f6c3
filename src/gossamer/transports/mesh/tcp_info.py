"""TCP statistics of the kernel (Linux' struct tcp_info): round trips, and packets sent and retransmitted."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

NUMBER = struct.Struct("=I")
ROUND_TRIP_MICROSECONDS = 68  # where tcpi_rtt lies in the struct; all numbers read here have 32 bits
RETRANSMITTED = 100  # tcpi_total_retrans
SENT = 156  # tcpi_data_segs_out, of Linux 4.6 and later


def packets(sockets: Iterable[socket.socket | None]) -> list[tuple[int, int]]:
    """(sent in all, retransmitted) of each; (0, 0) where there is no socket, and where the kernel does not say."""
    found = (None if each is None else _numbers(each, SENT, RETRANSMITTED) for each in sockets)
    return [(0, 0) if each is None else (each[0], each[1]) for each in found]


def round_trip_seconds(connection: socket.socket) -> float:
    """The kernel's own estimate; 0 where it does not say."""
    return _numbers(connection, ROUND_TRIP_MICROSECONDS)[0] / 1e6


def _numbers(connection: socket.socket, *places: int) -> tuple[int, ...]:
    """The numbers that lie at these places of the struct; zeros where the kernel does not say."""
    end = max(places) + NUMBER.size
    if hasattr(socket, "TCP_INFO"):
        with suppress(OSError):  # kernels that only imitate Linux do not all know it
            answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, end)
            if len(answer) >= end:
                return tuple(number for place in places for number in NUMBER.unpack_from(answer, place))
    return (0,) * len(places)

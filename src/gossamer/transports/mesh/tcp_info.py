"""How many packets the kernel has sent over a connection, and how many of them again."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

SENT_AGAIN, SENT = 100, 156  # where Linux' struct tcp_info has tcpi_total_retrans and tcpi_data_segs_out, of 32 bits
NUMBER = struct.Struct("=I")


def packets(sockets: Iterable[socket.socket | None]) -> list[tuple[int, int]]:
    """Of each: sent in all, sent again. (0, 0) where there is no socket, and where the kernel does not say."""
    return [(0, 0) if each is None else _of(each) for each in sockets]


def _of(connection: socket.socket) -> tuple[int, int]:
    if not hasattr(socket, "TCP_INFO"):
        return 0, 0
    try:
        answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT + NUMBER.size)
    except OSError:  # what only imitates Linux
        return 0, 0
    if len(answer) < SENT + NUMBER.size:  # Linux before 4.6
        return 0, 0
    (sent,), (again,) = NUMBER.unpack_from(answer, SENT), NUMBER.unpack_from(answer, SENT_AGAIN)
    return sent, again


def round_trip_seconds(connection: socket.socket) -> float:
    """tcpi_rtt of Linux' struct tcp_info: eight bytes, then numbers of 32 bits, of which this is the 16th."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    at = 8 + 15 * 4
    with suppress(OSError):  # kernels that only imitate Linux do not all know it
        answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 4)
        return int.from_bytes(answer[at : at + 4], sys.byteorder) / 1e6
    return 0.0

"""TCP statistics from the kernel (Linux' struct tcp_info): round trips, packets sent and retransmitted, silence."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

from gossamer.events import LinkCounters

NUMBER, LONG_NUMBER = struct.Struct("=I"), struct.Struct("=Q")
RETRANSMISSIONS, PROBES = 2, 3  # bytes: tcpi_retransmits and tcpi_probes, consecutive and unanswered
LIMITED = 7  # a byte; its lowest bit is tcpi_delivery_rate_app_limited
TIMER_MICROSECONDS = 8  # tcpi_rto
IN_FLIGHT = 24  # tcpi_unacked, in packets
ACKNOWLEDGED_MILLISECONDS = 56  # tcpi_last_ack_recv
ROUND_TRIP_MICROSECONDS = 68  # offset of tcpi_rtt in the struct; these fields have 32 bits
RETRANSMITTED = 100  # tcpi_total_retrans
SENT = 156  # tcpi_data_segs_out, of Linux 4.6 and later
RECEIVED = 128  # tcpi_bytes_received of Linux 4.1, with 64 bits
ACKNOWLEDGED, RATE = 120, 160  # tcpi_bytes_acked of Linux 4.1, tcpi_delivery_rate of 4.9, with 64 bits
BUSY, NO_ROOM = 168, 176  # tcpi_busy_time and, of that, tcpi_rwnd_limited, in microseconds; of 4.10, with 64 bits


def packets(sockets: Iterable[socket.socket | None]) -> list[tuple[int, int]]:
    """Return (packets sent, packets retransmitted) per socket; (0, 0) for None, or if they are not reported."""
    found = (None if each is None else _numbers(each, SENT, RETRANSMITTED) for each in sockets)
    return [(0, 0) if each is None else (each[0], each[1]) for each in found]


def round_trip_seconds(connection: socket.socket) -> float:
    """Return the kernel's estimate of the round trip; 0 if it reports none."""
    return _numbers(connection, ROUND_TRIP_MICROSECONDS)[0] / 1e6


def link_counters(connection: socket.socket) -> LinkCounters | None:
    """Return the counters; None if the kernel does not report them, or the connection is closed."""
    info = _info(connection, NO_ROOM + LONG_NUMBER.size)
    if not any(info):
        return None
    acknowledged, rate, busy, no_room = (
        LONG_NUMBER.unpack_from(info, place)[0] for place in (ACKNOWLEDGED, RATE, BUSY, NO_ROOM)
    )
    return LinkCounters(
        round_trip_seconds=NUMBER.unpack_from(info, ROUND_TRIP_MICROSECONDS)[0] / 1e6,
        acknowledged_bytes=acknowledged,
        retransmits=NUMBER.unpack_from(info, RETRANSMITTED)[0],
        busy_seconds=max(0, busy - no_room) / 1e6,
        flight_bytes_per_second=float(rate),
        limited=bool(info[LIMITED] & 1),
    )


def transferred_bytes(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes of payload sent and received so far; zeros if the kernel does not report them."""
    info = _info(connection, RECEIVED + LONG_NUMBER.size)
    return LONG_NUMBER.unpack_from(info, ACKNOWLEDGED)[0], LONG_NUMBER.unpack_from(info, RECEIVED)[0]


def unanswered_seconds(connection: socket.socket) -> float:
    """Return how long the peer's machine has not acknowledged data; 0 if none is outstanding, or it is unknown.

    The machine acknowledges, not the process, so a frozen process or a full receive buffer does not count.
    TCP_USER_TIMEOUT would also end such connections (Linux 5.11 and later count a closed window as silence).
    """
    info = _info(connection, ACKNOWLEDGED_MILLISECONDS + NUMBER.size)
    timer, in_flight, silent = (
        NUMBER.unpack_from(info, place)[0] for place in (TIMER_MICROSECONDS, IN_FLIGHT, ACKNOWLEDGED_MILLISECONDS)
    )
    # The timer doubles with each retransmission: silence exceeds it only if the last one was not acknowledged.
    retransmitted = in_flight > 0 and info[RETRANSMISSIONS] > 1 and silent / 1e3 > 1.25 * timer / 1e6 + 1.0
    probed = info[PROBES] > 1  # of a closed window; an answer resets it
    return silent / 1e3 if retransmitted or probed else 0.0


def _numbers(connection: socket.socket, *places: int) -> tuple[int, ...]:
    """Return the fields at these offsets of the struct; zeros if the kernel does not report them."""
    info = _info(connection, max(places) + NUMBER.size)
    return tuple(number for place in places for number in NUMBER.unpack_from(info, place))


def _info(connection: socket.socket, nbytes: int) -> bytes:
    """Return the beginning of the struct; zeros if the kernel does not report it."""
    if hasattr(socket, "TCP_INFO"):
        with suppress(OSError):  # not supported by kernels that only imitate Linux
            answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, nbytes)
            if len(answer) == nbytes:
                return answer
    return bytes(nbytes)

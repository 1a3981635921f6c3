"""TCP statistics of the kernel (Linux' struct tcp_info): round trips, packets sent and retransmitted, silence."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

from gossamer.events import LinkCounters

NUMBER, LONG_NUMBER = struct.Struct("=I"), struct.Struct("=Q")
RETRANSMISSIONS, PROBES = 2, 3  # bytes: tcpi_retransmits and tcpi_probes, in a row and unanswered
LIMITED = 7  # the byte whose lowest bit is tcpi_delivery_rate_app_limited
TIMER_MICROSECONDS = 8  # tcpi_rto
IN_FLIGHT = 24  # tcpi_unacked, in packets
ACKNOWLEDGED_MILLISECONDS = 56  # tcpi_last_ack_recv
ROUND_TRIP_MICROSECONDS = 68  # where tcpi_rtt lies in the struct; these numbers have 32 bits
RETRANSMITTED = 100  # tcpi_total_retrans
SENT = 156  # tcpi_data_segs_out, of Linux 4.6 and later
ACKNOWLEDGED, RATE = 120, 160  # tcpi_bytes_acked of Linux 4.1, tcpi_delivery_rate of 4.9, with 64 bits
BUSY, NO_ROOM = 168, 176  # tcpi_busy_time and, of that, tcpi_rwnd_limited, in microseconds; of 4.10, with 64 bits


def packets(sockets: Iterable[socket.socket | None]) -> list[tuple[int, int]]:
    """(sent in all, retransmitted) of each; (0, 0) where there is no socket, and where the kernel does not say."""
    found = (None if each is None else _numbers(each, SENT, RETRANSMITTED) for each in sockets)
    return [(0, 0) if each is None else (each[0], each[1]) for each in found]


def round_trip_seconds(connection: socket.socket) -> float:
    """The kernel's own estimate; 0 where it does not say."""
    return _numbers(connection, ROUND_TRIP_MICROSECONDS)[0] / 1e6


def link_counters(connection: socket.socket) -> LinkCounters | None:
    """None where the kernel does not say, or the connection is closed."""
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


def unanswered_seconds(connection: socket.socket) -> float:
    """How long the machine at the other end has owed an acknowledgment; 0 where it owes none, or nobody knows.

    It is the machine that acknowledges, not the process: one that is frozen, or busy with a full buffer, is not meant.
    TCP_USER_TIMEOUT would end such a connection, too (Linux 5.11 and later: a closed window counts as silence).
    """
    info = _info(connection, ACKNOWLEDGED_MILLISECONDS + NUMBER.size)
    timer, in_flight, silent = (
        NUMBER.unpack_from(info, place)[0] for place in (TIMER_MICROSECONDS, IN_FLIGHT, ACKNOWLEDGED_MILLISECONDS)
    )
    # The timer doubles with each retransmission: silence outlasts it only where the last one was not answered.
    retransmitted = in_flight > 0 and info[RETRANSMISSIONS] > 1 and silent / 1e3 > 1.25 * timer / 1e6 + 1.0
    probed = info[PROBES] > 1  # of a closed window; an answer sets it back
    return silent / 1e3 if retransmitted or probed else 0.0


def _numbers(connection: socket.socket, *places: int) -> tuple[int, ...]:
    """The numbers that lie at these places of the struct; zeros where the kernel does not say."""
    info = _info(connection, max(places) + NUMBER.size)
    return tuple(number for place in places for number in NUMBER.unpack_from(info, place))


def _info(connection: socket.socket, nbytes: int) -> bytes:
    """The beginning of the struct; zeros where the kernel does not say."""
    if hasattr(socket, "TCP_INFO"):
        with suppress(OSError):  # kernels that only imitate Linux do not all know it
            answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, nbytes)
            if len(answer) == nbytes:
                return answer
    return bytes(nbytes)

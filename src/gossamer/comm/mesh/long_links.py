"""Long links: TCP's congestion control, and socket buffers for a large bandwidth-delay product.

One TCP stream may have as many bytes in flight as its buffers hold. Linux grows them by itself up to a limit
(tcp_wmem, tcp_rmem), which fills 1 Gbit/s for round trips of about 30 ms. Under random loss, CUBIC and Reno reach a few
Mbit/s over long round trips (tcp_model); BBR (Cardwell et al. 2016, ACM Queue) does not slow down at each loss.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gossamer.comm.mesh.link_measurement import Links
from gossamer.errors import require

CONGESTION = "GOSSAMER_CONGESTION"
MOST_BUFFER_BYTES = 2**26
HEADROOM = 4  # the measurement ends before the window is open, and sent bytes stay in the buffer for a round trip
# SO_SNDBUFFORCE and SO_RCVBUFFORCE of Linux exceed the administrator's limits, if the process may configure networks
BUFFERS = (("tcp_wmem", socket.SO_SNDBUF, 32), ("tcp_rmem", socket.SO_RCVBUF, 33))
SETTINGS = Path("/proc/sys/net/ipv4")


def requested_congestion() -> str | None:
    """Return GOSSAMER_CONGESTION; None for the system's default. Raises ValueError if it is not available."""
    name = os.environ.get(CONGESTION)
    if name:
        check_congestion(name)
    return name or None


def check_congestion(name: str) -> None:
    """Raise ValueError unless a connection of this process can use this congestion control."""
    require(
        hasattr(socket, "TCP_CONGESTION"),
        f"congestion control {name!r} cannot be chosen on this system, which has no TCP_CONGESTION. Leave out "
        f"--congestion and {CONGESTION}.",
    )
    with socket.socket() as probe:
        try:
            use_congestion(probe, name)
        except OSError as problem:
            known, allowed = _words("tcp_available_congestion_control"), _words("tcp_allowed_congestion_control")
            if problem.errno in (errno.EPERM, errno.EACCES):
                remedy = (
                    f"this user may choose {', '.join(allowed)} only. Write one of these, or let the administrator "
                    f'allow it: sysctl -w net.ipv4.tcp_allowed_congestion_control="{" ".join([*allowed, name])}"'
                )
            else:
                remedy = f"this machine has {', '.join(known)}. Write one of these, or load its module as root"
            raise ValueError(f"unavailable congestion control {name!r}: {remedy}.") from None


def use_congestion(connection: socket.socket, name: str) -> None:
    """Use a congestion control from now on. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", 0), name.encode())


def fit_buffers(rank: int, sockets: Sequence[socket.socket | None], links: Links) -> None:
    """Enlarge socket buffers that are smaller than the bandwidth-delay product of their link requires.

    A buffer that the system may grow enough by itself is left alone. Without permission to exceed the administrator's
    limit (net.core.wmem_max, rmem_max) a buffer becomes as large as that limit, if this is an improvement.

    Args:
        rank: This rank.
        sockets: By rank; None at `rank`.
        links: The measured links.
    """
    for peer, connection in enumerate(sockets):
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        rates = min(links.up[rank], links.down[peer]), min(links.up[peer], links.down[rank])
        for (limits, option, force), rate in zip(BUFFERS, rates, strict=True):
            product = int(rate / 8 * links.round_trips[rank][peer])
            _widen(connection, option, force, min(HEADROOM * product, MOST_BUFFER_BYTES), _automatic_bytes(limits))


def _widen(connection: socket.socket, option: int, force: int, nbytes: int, automatic_bytes: int) -> None:
    if not automatic_bytes or nbytes <= automatic_bytes:
        return
    with suppress(OSError):  # not permitted
        connection.setsockopt(socket.SOL_SOCKET, force, nbytes)
        return
    limit = _numbers(f"../core/{'wmem_max' if option == socket.SO_SNDBUF else 'rmem_max'}")
    # The kernel doubles the value for its own structures, and never grows a buffer that was set
    if limit and 2 * min(nbytes, limit[0]) > automatic_bytes:
        connection.setsockopt(socket.SOL_SOCKET, option, min(nbytes, limit[0]))


def _automatic_bytes(name: str) -> int:
    """The size up to which the system grows a buffer by itself; 0 if it does not report it."""
    numbers = _numbers(name)
    return numbers[-1] if numbers else 0


def _numbers(name: str) -> list[int]:
    return [int(word) for word in _words(name)]


def _words(name: str) -> list[str]:
    try:
        return (SETTINGS / name).read_text().split()
    except OSError:  # not Linux, or hidden in a container
        return []

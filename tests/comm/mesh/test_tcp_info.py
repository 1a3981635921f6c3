"""TCP statistics: who owes an acknowledgment, by the kernel's numbers and by real connections."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import pytest

from gossamer.comm.mesh.tcp_info import unanswered_seconds


class Kernel:
    """A socket whose kernel says these numbers of struct tcp_info."""

    def __init__(self, *, retransmits: int = 0, probes: int = 0, timer: float = 0.2, in_flight: int = 0, silent: float):
        bytes_ = struct.pack("=8B", 1, 0, retransmits, probes, 0, 0, 0, 0)
        timers = struct.pack("=4I", round(timer * 1e6), 0, 1448, 1448)
        self._info = (bytes_ + timers + struct.pack("=I", in_flight)).ljust(56, b"\xff") + struct.pack(
            "=I", round(silent * 1e3)
        )

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self._info[:nbytes]


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (Kernel(silent=500.0), 0.0),  # nothing was sent
        (Kernel(silent=500.0, in_flight=3), 0.0),  # sent just now, after a long pause
        (Kernel(silent=500.0, in_flight=3, retransmits=1), 0.0),
        (Kernel(silent=31.0, in_flight=3, retransmits=6, timer=12.8), 31.0),
        (Kernel(silent=13.0, in_flight=3, retransmits=6, timer=12.8), 0.0),  # the answer to the last one may come
        (Kernel(silent=100.0, probes=1), 0.0),  # a window that is closed, and said to be whenever that is asked
        (Kernel(silent=100.0, probes=2), 100.0),
    ],
    ids=["idle", "after a pause", "one lost", "cut off", "too early", "closed window", "closed window, cut off"],
)
def test_only_an_acknowledgment_that_is_owed_counts(kernel: Kernel, seconds: float) -> None:
    assert unanswered_seconds(kernel) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("bytes_", [b"", b"\xff" * 20])
def test_where_the_kernel_does_not_say_nobody_owes_anything(bytes_: bytes) -> None:
    kernel = Kernel(silent=100.0, probes=2)
    kernel._info = bytes_
    assert unanswered_seconds(kernel) == 0.0  # type: ignore[arg-type]


def test_a_process_that_takes_nothing_is_reached_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as sender:
        sender.connect(listening.getsockname())
        sender.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(2**16))
        assert unanswered_seconds(sender) == 0.0

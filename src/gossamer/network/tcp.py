"""What TCP makes of a line: headers, how fast a stream may go, and how it starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt

from gossamer.network.link import Path

HEADER_BYTES = 20 + 20 + 12  # IPv4, TCP, timestamps
INITIAL_WINDOW_SEGMENTS = 10
LEAST_TIMEOUT_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """Streams in packets of at most `mtu_bytes`, headers of IP included.

    Every second packet is acknowledged by one that is all header, on the line back: RFC 5681, section 4.2.
    queue_bytes: what may wait before a line; a stream that is not held back keeps it full.
    """

    mtu_bytes: int = 1500
    queue_bytes: int = 2**18

    @property
    def segment_bytes(self) -> int:
        return self.mtu_bytes - HEADER_BYTES

    @property
    def initial_window_bytes(self) -> float:
        """RFC 6928: ten segments may be under way before anything was acknowledged."""
        return float(INITIAL_WINDOW_SEGMENTS * self.segment_bytes)

    def wire_bytes(self, nbytes: float) -> float:
        """Payload with its headers, and the acknowledgements of as much that comes the other way."""
        packets = ceil(nbytes / self.segment_bytes)
        return nbytes + packets * HEADER_BYTES + packets // 2 * HEADER_BYTES

    def most_bits_per_second(self, path: Path) -> float:
        """The rate, headers included, that random loss leaves one stream, however fast the line.

        Reno's window is 1.22 / sqrt(p) segments on average: Mathis et al. 1997, CCR. CUBIC keeps up with it, and
        holds 1.054 (round trip / p)^(3/4) where that is more: RFC 9438, section 5.1, with C = 0.4.
        """
        if not path.loss or not path.round_trip_seconds:
            return inf
        reno = 1.22 / sqrt(path.loss)
        cubic: float = 1.054 * (path.round_trip_seconds / path.loss) ** 0.75
        return max(reno, cubic) * self.segment_bytes * 8 / path.round_trip_seconds


ETHERNET = Tcp()


@dataclass
class Stream:
    """One direction of a connection: when it is free again, and how much it dares to have under way."""

    window_bytes: float
    free_seconds: float = 0.0

    def send(self, start: float, nbytes: float, line_bits_per_second: float, path: Path, tcp: Tcp) -> float:
        """The moment at which the last of `nbytes` leaves, on a line that has nothing else to carry.

        Slow start: the window doubles each round trip until the line is full (RFC 5681). A stream that was idle for
        a retransmission timeout halves its window, once for every such time, down to the initial one.
        """
        self._rest(start, path, tcp)
        rate = min(line_bits_per_second, tcp.most_bits_per_second(path)) / 8
        full, left, seconds = rate * path.round_trip_seconds, nbytes, 0.0
        grows = nbytes >= self.window_bytes / 2
        while left > self.window_bytes and self.window_bytes < full:
            left -= self.window_bytes
            seconds += path.round_trip_seconds
            self.window_bytes *= 2
        if grows and self.window_bytes < full:
            self.window_bytes += left
        self.free_seconds = start + seconds + left / rate
        return self.free_seconds

    def _rest(self, start: float, path: Path, tcp: Tcp) -> None:
        timeout = LEAST_TIMEOUT_SECONDS + path.round_trip_seconds
        halvings = int((start - self.free_seconds) / timeout)
        if halvings > 0 and self.window_bytes > tcp.initial_window_bytes:
            self.window_bytes = max(tcp.initial_window_bytes, self.window_bytes / 2.0 ** min(halvings, 60))

"""TCP model: headers, slow start, and the rate that loss leaves a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt

from gossamer.comm.network.model import Path

HEADER_BYTES = 20 + 20 + 12  # IPv4, TCP, timestamps
INITIAL_WINDOW_SEGMENTS = 10
LEAST_TIMEOUT_SECONDS = 0.2
RENO = 1.22  # segments under way, times the root of the share of packets lost
PARTS = 4  # of a window, each acknowledged by itself


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """Streams in packets of at most `mtu_bytes`, headers of IP included.

    Every second packet is acknowledged by one that is all header, on the line back: RFC 5681, section 4.2.
    """

    mtu_bytes: int = 1500
    queue_bytes: int = 2**18  # that may wait before a line; a stream that is not held back keeps it full

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

        Reno's window is RENO / sqrt(p) segments on average: Mathis et al. 1997, CCR. CUBIC keeps up with it, and
        holds 1.054 (round trip / p)^(3/4) where that is more: RFC 9438, section 5.1, with C = 0.4.
        """
        if not path.loss or not path.round_trip_seconds:
            return inf
        reno = RENO / sqrt(path.loss)
        cubic: float = 1.054 * (path.round_trip_seconds / path.loss) ** 0.75
        return max(reno, cubic) * self.segment_bytes * 8 / path.round_trip_seconds

    def most_loss(self, round_trip_seconds: float, bits_per_second: float) -> float:
        """The share of packets beyond which one stream would not reach a rate: the bound of Reno, the other way round.

        1 where nothing is known.
        """
        segments = bits_per_second * round_trip_seconds / (8 * self.segment_bytes)
        return min(1.0, (RENO / segments) ** 2) if segments else 1.0


ETHERNET = Tcp()


@dataclass
class Stream:
    """One direction of a connection: when it is free again, and how much it dares to have under way.

    Slow start: the window grows by what is acknowledged, while it is used, until the line is full (RFC 5681). Where
    CUBIC leaves slow start before (RFC 9406), sending on for some seconds opens the window all the same (RFC 9438):
    this is what a connection comes to that goes on being used.
    """

    window_bytes: float
    free_seconds: float = 0.0
    _unheard: deque[tuple[float, float]] = field(default_factory=deque)  # when it is acknowledged, bytes
    _under_way_bytes: float = 0.0
    _most_bytes: float = 0.0  # that were under way since nothing was

    def send(self, start: float, nbytes: float, line_bits_per_second: float, path: Path, tcp: Tcp) -> float:
        """The moment at which the last of `nbytes` leaves, on a line that has nothing else to carry."""
        self._rest(start, path, tcp)
        rate = min(line_bits_per_second, tcp.most_bits_per_second(path)) / 8
        now, left = start, nbytes
        while left > 0 and self.window_bytes < rate * path.round_trip_seconds:
            self.hear(now)
            room = self.window_bytes - self._under_way_bytes
            part = min(left, self.window_bytes / PARTS, room)
            if part < min(left, tcp.segment_bytes):
                now = self._unheard[0][0]
                continue
            now, left = now + part / rate, left - part
            self._unheard.append((now + path.round_trip_seconds, part))
            self._under_way_bytes += part
            self._most_bytes = max(self._most_bytes, self._under_way_bytes)
        self.free_seconds = now + left / rate
        return self.free_seconds

    def copy(self) -> Stream:
        """One that has carried the same."""
        return replace(self, _unheard=self._unheard.copy())

    def delay(self, seconds: float) -> None:
        """Move all that goes on by so many seconds."""
        self.free_seconds += seconds
        self._unheard = deque((moment + seconds, nbytes) for moment, nbytes in self._unheard)

    def window(self) -> tuple[Hashable, ...]:
        """All that the next bytes depend on, but when it is free again: two streams of equal windows are alike."""
        return self.window_bytes, self._under_way_bytes, self._most_bytes, *self._unheard

    def hear(self, now: float) -> None:
        """Take what is acknowledged by now. A window of which not even half was used does not grow: RFC 7661."""
        while self._unheard and self._unheard[0][0] <= now:
            _, heard = self._unheard.popleft()
            self._under_way_bytes -= heard
            if 2 * self._most_bytes >= self.window_bytes:
                self.window_bytes += heard
        if not self._unheard:
            self._under_way_bytes = self._most_bytes = 0.0

    def _rest(self, start: float, path: Path, tcp: Tcp) -> None:
        """Halve the window once for each retransmission timeout of silence, down to the initial one: RFC 2861."""
        timeout = LEAST_TIMEOUT_SECONDS + path.round_trip_seconds
        halvings = int((start - self.free_seconds) / timeout)
        if halvings > 0:
            self.hear(start)
            least = min(self.window_bytes, tcp.initial_window_bytes)
            self.window_bytes = max(least, self.window_bytes / 2.0 ** min(halvings, 60))

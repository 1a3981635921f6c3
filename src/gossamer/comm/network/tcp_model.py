"""TCP model: headers, slow start, and the throughput of a stream under loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt

from gossamer.comm.network.model import Path

HEADER_BYTES = 20 + 20 + 12  # IPv4, TCP, timestamps
INITIAL_WINDOW_SEGMENTS = 10
LEAST_TIMEOUT_SECONDS = 0.2
RENO = 1.22  # average window in segments, times the root of the loss rate
PARTS = 4  # of a window, acknowledged separately


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """Streams in packets of at most `mtu_bytes`, IP headers included.

    Every second packet is acknowledged by a packet without payload in the other direction: RFC 5681, section 4.2.
    """

    mtu_bytes: int = 1500
    queue_bytes: int = 2**18  # of the queue in front of a line, which an unlimited stream keeps full

    @property
    def segment_bytes(self) -> int:
        return self.mtu_bytes - HEADER_BYTES

    @property
    def initial_window_bytes(self) -> float:
        """RFC 6928: ten segments may be in flight before the first acknowledgment."""
        return float(INITIAL_WINDOW_SEGMENTS * self.segment_bytes)

    def wire_bytes(self, nbytes: float) -> float:
        """Return the bytes of a payload with headers, and of acknowledgments for an equal payload in return."""
        packets = ceil(nbytes / self.segment_bytes)
        return nbytes + packets * HEADER_BYTES + packets // 2 * HEADER_BYTES

    def most_bits_per_second(self, path: Path) -> float:
        """Return the throughput of one stream under random loss, headers included, on an infinitely fast line.

        Reno's average window is RENO / sqrt(p) segments: Mathis et al. 1997, CCR. CUBIC is at least as fast, and has a
        window of 1.054 (round trip / p)^(3/4) if that is larger: RFC 9438, section 5.1, with C = 0.4.
        """
        if not path.loss or not path.round_trip_seconds:
            return inf
        reno = RENO / sqrt(path.loss)
        cubic: float = 1.054 * (path.round_trip_seconds / path.loss) ** 0.75
        return max(reno, cubic) * self.segment_bytes * 8 / path.round_trip_seconds

    def most_loss(self, round_trip_seconds: float, bits_per_second: float) -> float:
        """Return the loss rate above which one stream cannot reach a throughput: the inverse of Reno's bound.

        1 if there is no bound.
        """
        segments = bits_per_second * round_trip_seconds / (8 * self.segment_bytes)
        return min(1.0, (RENO / segments) ** 2) if segments else 1.0


ETHERNET = Tcp()


@dataclass
class Stream:
    """One direction of a connection: when it is free again, and its congestion window.

    Slow start: the window grows with acknowledgments while it is used, until the line is saturated (RFC 5681). If CUBIC
    leaves slow start earlier (RFC 9406), sending for some seconds still opens the window (RFC 9438). The model has the
    state that a connection in continued use reaches.
    """

    window_bytes: float
    free_seconds: float = 0.0
    _unheard: deque[tuple[float, float]] = field(default_factory=deque)  # (time of acknowledgment, bytes)
    _under_way_bytes: float = 0.0
    _most_bytes: float = 0.0  # most bytes in flight since none were

    def send(self, start: float, nbytes: float, line_bits_per_second: float, path: Path, tcp: Tcp) -> float:
        """Return the time at which the last of `nbytes` leaves, on an otherwise idle line."""
        self._rest(start, path, tcp)
        rate = min(line_bits_per_second, tcp.most_bits_per_second(path)) / 8
        now, left = start, nbytes
        while left > 0 and self.window_bytes < rate * path.round_trip_seconds:
            self.acknowledge(now)
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
        """Return a stream with the same state."""
        return replace(self, _unheard=self._unheard.copy())

    def delay(self, seconds: float) -> None:
        """Shift all times by `seconds`."""
        self.free_seconds += seconds
        self._unheard = deque((moment + seconds, nbytes) for moment, nbytes in self._unheard)

    def window(self) -> tuple[Hashable, ...]:
        """Return the state on which later sends depend, except for free_seconds."""
        return self.window_bytes, self._under_way_bytes, self._most_bytes, *self._unheard

    def acknowledge(self, now: float) -> None:
        """Process acknowledgments until now. A window that was less than half used does not grow: RFC 7661."""
        while self._unheard and self._unheard[0][0] <= now:
            _, received = self._unheard.popleft()
            self._under_way_bytes -= received
            if 2 * self._most_bytes >= self.window_bytes:
                self.window_bytes += received
        if not self._unheard:
            self._under_way_bytes = self._most_bytes = 0.0

    def _rest(self, start: float, path: Path, tcp: Tcp) -> None:
        """Halve the window once per retransmission timeout of silence, down to the initial window: RFC 2861."""
        timeout = LEAST_TIMEOUT_SECONDS + path.round_trip_seconds
        halvings = int((start - self.free_seconds) / timeout)
        if halvings > 0:
            self.acknowledge(start)
            least = min(self.window_bytes, tcp.initial_window_bytes)
            self.window_bytes = max(least, self.window_bytes / 2.0 ** min(halvings, 60))

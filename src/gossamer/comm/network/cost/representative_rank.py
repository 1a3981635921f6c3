"""Representative rank: carries the messages of one rank in virtual time, where all others do as it does.

On a network whose hosts and paths are all alike, and in an exchange that looks alike from every rank, what rank 0
sends to rank q leaves when what some other rank sends to rank 0 leaves, and arrives when that arrives. So one line out,
one line in and the connections of one rank tell what a simulation of all ranks tells (message_simulator), in time that
grows with a rank's messages instead of with those of all.

Connections that have carried the same are kept as one TCP stream; only when each is free again is kept for each. Where
they begin at different moments, behind another exchange that goes on, all acknowledgements come as those of the first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from gossamer.comm.network.cost.message_simulator import EAGER_ENVELOPE_BYTES
from gossamer.comm.network.model import Host, Network, Path
from gossamer.comm.network.tcp_model import LEAST_TIMEOUT_SECONDS, Stream, Tcp

Seconds = npt.NDArray[np.float64]
Peers = npt.NDArray[np.int64]
ALIKE_ROUNDS = 32  # one after the other, after which all that follow take as long
ALIKE = 1e-9  # of a round's seconds: two that differ by less are alike
ROUNDING = 1e-15  # of the clock
MOST_STREAMS = 64  # before those that have become alike are looked for
FEWEST = 64  # connections there is room for: also of small groups whose table has a round more than ranks


@dataclass(frozen=True)
class UniformNetwork:
    """So many hosts that are all alike, each pair connected by a path like any other's."""

    world: int
    host: Host
    path: Path

    @classmethod
    def of(cls, network: Network) -> UniformNetwork:
        """network: one that `is_uniform`."""
        return cls(len(network.hosts), network.hosts[0], network.default)

    @property
    def bits_per_second(self) -> float:
        """The most that one host can send to another."""
        return min(self.host.up_bits_per_second, self.host.down_bits_per_second)

    @property
    def latency_seconds(self) -> float:
        return self.path.round_trip_seconds / 2 + self.path.jitter_seconds


class RepresentativeRank:
    """One rank's lines and connections, which remember what they carried. peers: by their distance, from 1."""

    def __init__(self, network: UniformNetwork, tcp: Tcp) -> None:
        self.network, self._tcp = network, tcp
        self._up = self._down = 0.0
        self._free: Seconds = np.zeros(
            max(FEWEST, network.world)
        )  # when each connection has sent all that it was given
        self._kinds: npt.NDArray[np.int64] = np.zeros(
            max(FEWEST, network.world), dtype=np.int64
        )  # which stream each one is like
        self._streams = [Stream(tcp.initial_window_bytes)]

    def exchange(self, peers: Peers, nbytes: float, now: float, messages: int = 1) -> float:
        """So many messages of `nbytes` to each of `peers` from now on, and as many from as many; when the last is here.

        Messages to one peer leave as one stream, with the headers of each.
        """
        wire_bytes = messages * self._tcp.wire_bytes(nbytes + EAGER_ENVELOPE_BYTES)
        return self._carry(peers, wire_bytes, now) if len(peers) and messages else now

    def rounds(self, count: int, peers: Peers, nbytes: float, now: float, messages: int = 1) -> float:
        """So many equal exchanges, each after the one before; once they all take as long, the rest is multiplied."""
        usual, alike = inf, 0
        for made in range(count):
            before, now = now, self.exchange(peers, nbytes, now, messages)
            seconds = now - before
            alike = alike + 1 if abs(seconds - usual) <= ALIKE * seconds + ROUNDING * now else 0
            usual = seconds
            if alike == ALIKE_ROUNDS:
                return self._later((count - 1 - made) * seconds, peers, now)
        return now

    def _later(self, seconds: float, peers: Peers, now: float) -> float:
        """All that goes on moves by so many seconds."""
        self._up, self._down = self._up + seconds, self._down + seconds
        self._free[peers] += seconds
        kinds, which = np.unique(self._kinds[peers], return_inverse=True)
        self._kinds[peers] = which.reshape(-1) + len(self._streams)
        moved = [self._streams[kind].copy() for kind in kinds]
        for stream in moved:
            stream.delay(seconds)
        self._streams += moved
        return now + seconds

    def _carry(self, peers: Peers, wire_bytes: float, now: float) -> float:
        bits, host = 8 * wire_bytes, self.network.host
        begins = np.maximum(now, self._free[peers])
        ups = _on_line(self._up, begins, bits / host.up_bits_per_second)
        left = np.maximum(ups, self._streamed(peers, begins, wire_bytes))
        self._up, self._free[peers] = float(ups[-1]), left
        order = np.argsort(left, kind="stable") if (left[1:] < left[:-1]).any() else slice(None)
        downs = _on_line(self._down, begins[order], bits / host.down_bits_per_second)
        self._down = float(downs[-1])
        return float(np.maximum(downs, left[order]).max()) + self.network.latency_seconds

    def _streamed(self, peers: Peers, begins: Seconds, wire_bytes: float) -> Seconds:
        """When each connection could have sent its bytes, had it a line of its own."""
        path = self.network.path
        for stream in self._streams:
            stream.hear(float(begins.min()))
        if len(self._streams) > MOST_STREAMS:
            self._merge()
        rests = np.maximum(0, (begins - self._free[peers]) / (LEAST_TIMEOUT_SECONDS + path.round_trip_seconds))
        firsts, which = _groups(self._kinds[peers] + len(self._streams) * rests.astype(np.int64))
        took, before = np.empty(len(firsts)), self._kinds[peers[firsts]]
        self._kinds[peers] = which + len(self._streams)
        for group, place in enumerate(firsts):
            stream, begin = self._streams[before[group]].copy(), float(begins[place])
            stream.free_seconds = float(self._free[peers[place]])
            took[group] = stream.send(begin, wire_bytes, self.network.bits_per_second, path, self._tcp) - begin
            self._streams.append(stream)
        return begins + took[which]

    def _merge(self) -> None:
        """Keep one stream for all connections whose streams have become alike, and none that no connection has."""
        used, places = np.unique(self._kinds, return_inverse=True)
        numbers: dict[Hashable, int] = {}
        merged = [numbers.setdefault(self._streams[kind].window(), len(numbers)) for kind in used]
        kept = {number: self._streams[kind] for kind, number in zip(used, merged, strict=True)}
        self._streams = [kept[number] for number in range(len(numbers))]
        self._kinds = np.array(merged, dtype=np.int64)[places.reshape(-1)]


def _groups(keys: Peers) -> tuple[Peers, Peers]:
    """Which keys are equal: (where the first of each kind stands, which kind each one is)."""
    if (keys == keys[0]).all():
        return np.zeros(1, dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def _on_line(free: float, begins: Seconds, seconds: float) -> Seconds:
    """When each of several messages has passed a line that carries one at a time, in this order."""
    passed = np.cumsum(np.concatenate([[max(free, begins[0])], np.full(len(begins), seconds)]))
    if (begins[1:] <= passed[1:-1]).all():
        return passed[1:]
    for place, begin in enumerate(begins):
        free = max(free, begin) + seconds
        passed[place + 1] = free
    return passed[1:]

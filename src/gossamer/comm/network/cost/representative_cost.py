"""Representative cost: when operations complete if all ranks behave equally, from the messages of one of them.

On a network with equal hosts and paths, and in an exchange that is symmetric in the ranks, the message from rank 0 to
rank q leaves and arrives at the same times as a message from some other rank to rank 0. One outgoing line, one incoming
line and the connections of one rank therefore give the result of a simulation of all ranks (message_simulator), in a
time that grows with one rank's messages instead of all. Compared with op_cost.NetworkCost:

- all-gathers, all-to-alls of equal parts, exchanges on a ring, torus or other vertex-transitive graph, and means by
  `direct` and `ring` take equally long, to 1e-9, if tensors are cut into equal pieces and no other operation is in
  flight;
- all pieces count as the longest, which has one element more than the shortest if a tensor cannot be cut evenly; the
  same holds for the parts of an all-to-all;
- a table of hops takes as long as for its busiest rank, and a round ends when its last message has arrived. In
  `halving` and `hierarchical` a piece could continue before the others of its round have arrived. In `halving` with a
  world that is not a power of two, and in `hierarchical` with a smaller last node, some ranks are less busy. A `tree`
  is evaluated along a path from its deepest leaf to the root and back; the chunks after the first are as fast as the
  line of a rank with a parent and two children;
- an operation completes on all ranks when it completes on the last;
- if payloads differ between ranks, all count as the largest.

Connections with the same history share one TCP stream; only the time when it is free is kept per connection. If they
begin at different times, behind another exchange in flight, all acknowledgments arrive like those of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from gossamer.algorithms.collectives import Collective, Does, TreeAllReduce
from gossamer.base.layout import Itself
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_bytes,
)
from gossamer.comm.network.cost.message_schedule import CHUNK_BYTES
from gossamer.comm.network.cost.message_simulator import EAGER_ENVELOPE_BYTES
from gossamer.comm.network.model import Host, Network, Path
from gossamer.comm.network.tcp_model import ETHERNET, LEAST_TIMEOUT_SECONDS, Stream, Tcp

# -- one rank ----------------------------------------------------------------------------------------------------------


Seconds = npt.NDArray[np.float64]
Peers = npt.NDArray[np.int64]
ALIKE_ROUNDS = 32  # consecutive equal rounds, after which all later ones are assumed to be equal
ALIKE = 1e-9  # relative difference of two rounds that count as equal
ROUNDING = 1e-15  # relative, of the clock
MOST_STREAMS = 64  # before equal streams are merged
FEWEST = 64  # least number of connections to allocate: a table of a small group may have more rounds than ranks


@dataclass(frozen=True)
class UniformNetwork:
    """Equal hosts, with equal paths between every pair."""

    world: int
    host: Host
    path: Path

    @classmethod
    def of(cls, network: Network) -> UniformNetwork:
        """Convert a network that `is_uniform`."""
        return cls(len(network.hosts), network.hosts[0], network.default)

    @property
    def bits_per_second(self) -> float:
        """Bandwidth from one host to another."""
        return min(self.host.up_bits_per_second, self.host.down_bits_per_second)

    @property
    def latency_seconds(self) -> float:
        return self.path.round_trip_seconds / 2 + self.path.jitter_seconds


class RepresentativeRank:
    """One rank's lines and connections with their state. Peers are identified by their distance, from 1."""

    def __init__(self, network: UniformNetwork, tcp: Tcp) -> None:
        self.network, self._tcp = network, tcp
        self._up = self._down = 0.0
        self._free: Seconds = np.zeros(max(FEWEST, network.world))  # when each connection has sent all of its messages
        self._kinds: npt.NDArray[np.int64] = np.zeros(
            max(FEWEST, network.world), dtype=np.int64
        )  # index of each connection's stream
        self._streams = [Stream(tcp.initial_window_bytes)]

    def exchange(self, peers: Peers, nbytes: float, now: float, messages: int = 1) -> float:
        """Send `messages` messages of `nbytes` to each of `peers`, and receive as many; return the last arrival.

        Messages to one peer leave as one stream, each with its headers.
        """
        wire_bytes = messages * self._tcp.wire_bytes(nbytes + EAGER_ENVELOPE_BYTES)
        return self._carry(peers, wire_bytes, now) if len(peers) and messages else now

    def rounds(self, count: int, peers: Peers, nbytes: float, now: float, messages: int = 1) -> float:
        """Perform equal consecutive exchanges. Once all take equally long, the remaining time is extrapolated."""
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
        """Shift the state by `seconds`."""
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
        """Return when each connection could have sent its bytes on an exclusive line."""
        path = self.network.path
        for stream in self._streams:
            stream.acknowledge(float(begins.min()))
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
        """Merge equal streams, and remove unused ones."""
        used, places = np.unique(self._kinds, return_inverse=True)
        numbers: dict[Hashable, int] = {}
        merged = [numbers.setdefault(self._streams[kind].window(), len(numbers)) for kind in used]
        kept = {number: self._streams[kind] for kind, number in zip(used, merged, strict=True)}
        self._streams = [kept[number] for number in range(len(numbers))]
        self._kinds = np.array(merged, dtype=np.int64)[places.reshape(-1)]


def _groups(keys: Peers) -> tuple[Peers, Peers]:
    """Group equal keys: (index of the first of each group, group of each key)."""
    if (keys == keys[0]).all():
        return np.zeros(1, dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def _on_line(free: float, begins: Seconds, seconds: float) -> Seconds:
    """Return when each of several messages has passed a line that transmits one at a time, in this order."""
    passed = np.cumsum(np.concatenate([[max(free, begins[0])], np.full(len(begins), seconds)]))
    if (begins[1:] <= passed[1:-1]).all():
        return passed[1:]
    for place, begin in enumerate(begins):
        free = max(free, begin) + seconds
        passed[place + 1] = free
    return passed[1:]


# -- tables of hops ----------------------------------------------------------------------------------------------------


AS_FAST = 1.001  # costs within this factor count as equal
REST_SECONDS = 1.0  # of computation between two means, in which congestion windows decay
MOST_MEANS = 4  # after which connections are in steady state


def table_end(
    collective: Collective, numel: int, itemsize: int, rank: RepresentativeRank, ranks: Peers, now: float
) -> float:
    """Return when the last rank of a group has the sum of a tensor, if all begin now. ranks: the group's, by index."""
    world = len(ranks)
    if isinstance(collective, TreeAllReduce):
        return _tree_end(numel * itemsize, rank, world, now)
    pieces = collective.pieces(world)
    nbytes = ceil(numel / pieces) * itemsize
    for count, places, messages in _rounds(collective, world, min(numel, pieces)):
        now = rank.rounds(count, ranks[places], nbytes, now, messages)
    return now


def table_seconds_alike(
    collective: Collective,
    nbytes: int,
    itemsize: int,
    network: UniformNetwork,
    tcp: Tcp = ETHERNET,
    rest_seconds: float = REST_SECONDS,
) -> float:
    """Return the time of a sum that all ranks begin at once, in steady state with a pause before each."""
    rank, ranks = RepresentativeRank(network, tcp), np.arange(network.world)
    begin, before = 0.0, inf
    for _ in range(MOST_MEANS):
        end = table_end(collective, nbytes // itemsize, itemsize, rank, ranks, begin)
        seconds, begin = end - begin, end + rest_seconds
        if before / AS_FAST <= seconds <= before * AS_FAST:
            break
        before = seconds
    return seconds


@lru_cache(maxsize=256)
def _rounds(collective: Collective, world: int, filled: int) -> tuple[tuple[int, Peers, int], ...]:
    """Return (number of equal rounds, indices of the peers, messages to each) of the busiest rank.

    filled: number of non-empty pieces, which are the first ones. Each round has at least one of them on some rank.
    """
    busiest = collective.busiest(world)
    found: list[tuple[tuple[int, ...], int]] = []
    for _, hops in groupby(collective.hops(busiest, world), key=lambda hop: hop.round):
        sent, received = Counter[int](), Counter[int]()
        for hop in hops:
            way = sent if hop.does is Does.SEND else received
            way[hop.peer] += max(1, min(hop.stop, filled) - hop.first)
        peers = sent or received
        messages = max(max(way.values(), default=0) for way in (sent, received))
        found.append((tuple((peer - busiest) % world for peer in peers), messages))
    return tuple((len(list(same)), np.array(peers), messages) for (peers, messages), same in groupby(found))


def _tree_end(nbytes: int, rank: RepresentativeRank, world: int, now: float) -> float:
    """Up and down through all levels, with two children at each."""
    depth, chunks = world.bit_length() - 1, max(1, ceil(nbytes / CHUNK_BYTES))
    for hop in range(2 * depth):  # each by another rank, with unused connections
        now = rank.exchange(np.array([2 * hop + 1, 2 * hop + 2])[: world - 1], nbytes / chunks, now)
    lines = np.arange(1, 4) if world > 4 else np.arange(1, 3)
    return rank.exchange(lines, nbytes / chunks, now, chunks - 1)


# -- operations --------------------------------------------------------------------------------------------------------

Choose = Callable[[int, int, UniformNetwork], Collective]  # the table for (bytes, itemsize) on a network


class RepresentativeCost:
    """Completion times for a group of equal ranks (an AnswerTimes). Lines and connections keep their state.

    Any number of ranks may be passed: they represent all, and begin when the last of them does.
    """

    def __init__(self, network: UniformNetwork, choose: Choose, tcp: Tcp = ETHERNET) -> None:
        self._network, self._choose = network, choose
        self._rank = RepresentativeRank(network, tcp)
        self._all = np.arange(network.world)

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        """Return when each rank has its result, if all issue ops[0] when the last of them does."""
        return [self._end(ops[0], self._all, max(starts))] * len(starts)

    def broadcast(self, nbytes: int, starts: Sequence[float], source: int = 0) -> list[float]:
        """The source scatters parts, and each rank sends its part to the others; returns when the last one arrives."""
        peers, part = self._all[1:], -(-nbytes // max(1, len(self._all) - 1))
        scattered = self._rank.exchange(peers, part, max(starts))
        return [self._rank.exchange(peers[:-1], part, scattered)] * len(starts)

    def _end(self, op: CollectiveOp, ranks: Peers, now: float) -> float:
        match op:
            case AllReduceMean(tensor):
                return self._mean(tensor.numel(), tensor.element_size(), ranks, now)
            case AllGather(forms=tuple(forms)) | AllToAll(forms=tuple(forms)):
                return self._rank.exchange(ranks[1:], max(map(payload_bytes, forms)), now)
            case AllGather(payload):
                return self._rank.exchange(ranks[1:], payload_bytes(payload), now)
            case AllToAll():
                return self._rank.exchange(ranks[1:], _largest_part(Itself(op)), now)
            case NeighborAllGather(payload):
                outgoing, received = ([peer for peer in peers if peer] for peers in (op.receivers, op.senders))
                return self._rank.exchange(ranks[max(outgoing, received, key=len)], payload_bytes(payload), now)
            case InGroup(group, inner):
                return self._end(inner, ranks[np.array(group) - group[0]], now)
            case Coalesced():
                means_last = sorted(op.concurrent(), key=lambda each: isinstance(each, AllReduceMean))
                return max(self._end(each, ranks, now) for each in means_last)

    def _mean(self, numel: int, itemsize: int, ranks: Peers, now: float) -> float:
        if len(ranks) == 1:
            return now
        there = UniformNetwork(len(ranks), self._network.host, self._network.path)
        return table_end(self._choose(numel * itemsize, itemsize, there), numel, itemsize, self._rank, ranks, now)


@lru_cache(maxsize=64)
def _largest_part(op: Itself[AllToAll]) -> int:
    return max(payload_bytes(part) for part in {id(part): part for part in op.item.parts}.values())

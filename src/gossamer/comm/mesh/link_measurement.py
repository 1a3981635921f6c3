"""Link measurement: measures round trips, bandwidths and losses between workers when the group is formed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch

from gossamer.base.ops import AllGather, NeighborAllGather
from gossamer.base.transport import Transport
from gossamer.comm.mesh import bandwidth_probe
from gossamer.comm.mesh.bandwidth_probe import Flow, Rates
from gossamer.comm.network import Host, Network
from gossamer.comm.network.site_detection import NOISE_SECONDS, measured, sites_of
from gossamer.comm.network.tcp_model import ETHERNET

Matrix = tuple[tuple[float, ...], ...]
LOST_ENOUGH = 5  # retransmitted packets that a loss estimate of a path requires
MOST_LOST = 0.5  # bound, because retransmissions include repeated SYNs, which are not counted as sent


@dataclass(frozen=True)
class RelayLine:
    """A relay of connections between ranks.

    Attributes:
        number: The number of its peer; the coordinator has 0.
        rank: The first rank on its machine, with which it shares the line; None without one.
        up: Upload bandwidth in bits per second, headers included.
        down: Download bandwidth in bits per second, headers included.
    """

    number: int
    rank: int | None
    up: float
    down: float


@dataclass(frozen=True)
class RelayRoutes:
    """How the ranks are connected, equal on all ranks.

    Attributes:
        relays: (number, first rank on its machine or None) of each relay in use, by number.
        relayed: As in Links; zeros without relays.
    """

    relays: tuple[tuple[int, int | None], ...]
    relayed: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(here: Sequence[int | None], by: Sequence[Mapping[int, int]]) -> RelayRoutes:
        """Combine the declarations of all ranks.

        Args:
            here: By rank: the number of the relay on its machine; None without one.
            by: By rank: the number of the relay to each relayed peer.
        """
        world = range(len(by))
        pairs = {(low, high): by[high].get(low) for high in world for low in range(high)}  # the higher rank calls
        used = sorted({number for number in pairs.values() if number is not None})
        index = {number: 1 + place for place, number in enumerate(used)} | {None: 0}
        return RelayRoutes(
            relays=tuple((number, here.index(number) if number in here else None) for number in used),
            relayed=tuple(tuple(index[pairs.get((min(a, b), max(a, b)))] for b in world) for a in world),
        )

    def lines(self, a: int, b: int) -> set[int]:
        """Return the ranks whose lines a connection loads, and the number behind all ranks of a relay on a machine
        without one."""
        if not (number := self.relayed[a][b]):
            return {a, b}
        rank = self.relays[number - 1][1]
        return {a, b, len(self.relayed) + number if rank is None else rank}

    @property
    def spokes(self) -> list[tuple[int, int]]:
        """Each rank on the machine of a relay, with each rank whose connections it relays."""
        ranks = range(len(self.relayed))
        relays = [(number, rank) for number, (_, rank) in enumerate(self.relays, 1) if rank is not None]
        return [
            (rank, peer) for number, rank in relays for peer in ranks if peer != rank and number in self.relayed[peer]
        ]

    def pairs(self, relay: int) -> list[tuple[int, int]]:
        """Return disjoint pairs of ranks of other machines that the relay with this index connects, as many as a greedy
        choice finds."""
        found: list[tuple[int, int]] = []
        left = {rank for rank in range(len(self.relayed)) if rank != self.relays[relay][1]}
        for a, b in combinations(range(len(self.relayed)), 2):
            if {a, b} <= left and self.relayed[a][b] == 1 + relay:
                found.append((a, b))
                left -= {a, b}
        return found


@dataclass(frozen=True)
class Links:
    """The links between ranks, equal on all ranks.

    They determine the all-reduce algorithm, and so the last bits of sums: a resumed run uses the links of the original.

    Attributes:
        round_trips: [i][j]: seconds between ranks i and j.
        up: Upload bandwidth of each rank in bits per second, headers included.
        down: Download bandwidth of each rank in bits per second, headers included.
        losses: [i][j]: fraction of packets lost between i and j; 0 if too few were sent for an estimate.
        shared: [i][j]: bandwidth in bits per second that the sites of i and j share between them; 0 if unknown.
        ways: Seconds of means on devices, as engine_selector.measured_ways; empty if unknown.
        relays: The relays that connect pairs of ranks.
        relayed: [i][j]: 1 + the index in `relays` of the relay between i and j; 0 for a direct connection. Empty
            without relays.
    """

    round_trips: Matrix
    up: tuple[float, ...]
    down: tuple[float, ...]
    losses: Matrix
    shared: Matrix = ()
    ways: Matrix = ()
    relays: tuple[RelayLine, ...] = ()
    relayed: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def alike(round_trips: Matrix, bits_per_second: float) -> Links:
        """Build lossless links with the same bandwidth in both directions."""
        world = len(round_trips)
        lines = (bits_per_second,) * world
        return Links(round_trips, lines, lines, ((0.0,) * world,) * world)

    @staticmethod
    def of(text: str) -> Links:
        """Parse the result of `text`, also in the older form with one bandwidth for all ranks."""
        content = json.loads(text)
        if isinstance(content, list):
            return Links.alike(_matrix(content[0]), content[1])
        return Links(
            _matrix(content["round_trips"]),
            tuple(content["up"]),
            tuple(content["down"]),
            _matrix(content["losses"]),
            _matrix(content.get("shared", ())),
            _matrix(content.get("ways", ())),
            tuple(RelayLine(**each) for each in content.get("relays", ())),
            tuple(map(tuple, content.get("relayed", ()))),
        )

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def network(self) -> Network:
        if not self.relays:
            return measured(self.round_trips, self.up, self.down, self.losses, self.shared)
        apart = [index for index, each in enumerate(self.relays) if each.rank is None]
        numbers = [
            len(self.up) + apart.index(index) if each.rank is None else each.rank
            for index, each in enumerate(self.relays)
        ]
        hosts = [
            Host(up_bits_per_second=self.relays[index].up, down_bits_per_second=self.relays[index].down)
            for index in apart
        ]
        pairs = {(a, b): self.relayed[a][b] for a, b in combinations(range(len(self.up)), 2) if self.relayed[a][b]}
        relayed = {frozenset(pair): numbers[number - 1] for pair, number in pairs.items()}
        # Bytes to or from a rank pass the relay on its own machine without another line
        beyond = {pair: relay for pair, relay in relayed.items() if relay not in pair}
        network = measured(self.round_trips, self.up, self.down, self.losses, self.shared, beyond.keys())
        return replace(network, relays=tuple(hosts), relayed=beyond)

    def bits_per_second(self, sender: int, receiver: int) -> float:
        """Return the bandwidth of a connection alone: that of its slowest line."""
        lines = [self.up[sender], self.down[receiver]]
        if self.relays and (number := self.relayed[sender][receiver]):
            relay = self.relays[number - 1]
            lines += [] if relay.rank in (sender, receiver) else [relay.down, relay.up]
        return min(lines)

    def detours(self, rank: int) -> dict[int, int | None]:
        """Return the ranks to which a relay forwards the bytes of this rank: the rank on the relay's machine, or None
        without one, by receiver. The relay on a rank's own machine is on the way to it, and no detour."""
        found = {}
        for peer, number in enumerate(self.relayed[rank] if self.relays else ()):
            if number and (at := self.relays[number - 1].rank) not in (rank, peer):
                found[peer] = at
        return found

    def among(self, ranks: Sequence[int]) -> Links:
        """Return the links between some ranks. A relay whose rank is not among them continues to relay."""
        ranks = list(ranks)

        def some(row: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(row[rank] for rank in ranks)

        def between(matrix: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
            return tuple(some(matrix[rank]) for rank in ranks)

        shared = between(self.shared) if self.shared else ()
        links = Links(between(self.round_trips), some(self.up), some(self.down), between(self.losses), shared)
        relayed = between(self.relayed) if self.relays else ()
        used = sorted({number for row in relayed for number in row if number})
        if not used:
            return links
        relays = [self.relays[number - 1] for number in used]
        places = [ranks.index(each.rank) if each.rank in ranks else None for each in relays]
        return replace(
            links,
            relays=tuple(replace(each, rank=place) for each, place in zip(relays, places, strict=True)),
            relayed=tuple(tuple(1 + used.index(number) if number else 0 for number in row) for row in relayed),
        )

    def by(self, routes: RelayRoutes) -> Links | None:
        """Return these links with the relays that are used now. None if they must be measured again: a pair that was
        connected directly is relayed, or the other way around, or a relay was not measured."""
        known = {each.number: each for each in self.relays}
        now = routes.relayed
        before = self.relayed or ((0,) * len(now),) * len(now)
        same = all(bool(a) is bool(b) for rows in zip(now, before, strict=True) for a, b in zip(*rows, strict=True))
        if not same or not {number for number, _ in routes.relays} <= known.keys():
            return None
        relays = tuple(replace(known[number], rank=rank) for number, rank in routes.relays)
        return replace(self, relays=relays, relayed=now if relays else ())


def _matrix(rows: Sequence[Sequence[float]]) -> Matrix:
    return tuple(map(tuple, rows))


Packets = tuple[int, int]  # (sent, retransmitted)


def measure(
    transport: Transport,
    round_trips: list[float],
    packets: Callable[[], list[Packets]],
    routes: RelayRoutes | None = None,
) -> Links:
    """Measure the links between all ranks. Collective call with equal results on all ranks.

    On a single machine, all ranks get the same bandwidth.

    Args:
        transport: Over this group's own connections.
        round_trips: Seconds to each rank, or to the relay of a relayed rank; 0 if unknown.
        packets: Returns the packet counts to each rank.
        routes: How the ranks are connected; None if all are connected directly.
    """
    world = range(transport.world)
    relayed = ((0,) * transport.world,) * transport.world if routes is None else routes.relayed
    seen = _round_trips(_gathered(transport, round_trips), relayed)
    sites = sites_of(seen)

    def met(flows: Sequence[Flow], nbytes: int) -> Mapping[Flow, float]:
        return meet(transport, flows, nbytes)

    if routes is None or not routes.relays:
        found = bandwidth_probe.find(sites, seen, met)
    else:
        found = bandwidth_probe.find(sites, seen, met, routes.lines, routes.spokes)
    kinds = bandwidth_probe.alike if max(map(max, seen)) > NOISE_SECONDS else bandwidth_probe.all_alike
    up, down = (kinds([rate(rank) for rank in world]) for rate in (found.up, found.down))
    lost = losses(sites, seen, found, _gathered(transport, packets()))
    links = Links(seen, up, down, lost, shared(sites, bandwidth_probe.find_shared(sites, seen, met)))
    if routes is None or not routes.relays:
        return links
    forwarded, sent = list[float](), list[float]()
    for relay, (_, rank) in enumerate(routes.relays):
        flows = [flow for a, b in routes.pairs(relay) for flow in ((a, b), (b, a))]
        forwarded.append(bandwidth_probe.find_total(flows, seen, met) if flows else 0.0)
        own = [spoke for spoke in routes.spokes if spoke[0] == rank]
        sent.append(bandwidth_probe.find_total(own, seen, met) if flows and own else 0.0)
    return _with_relays(links, routes, forwarded, sent)


def _with_relays(links: Links, routes: RelayRoutes, forwarded: Sequence[float], sent: Sequence[float]) -> Links:
    """Add relays that forward at these rates, and whose ranks send at these rates. The line of a rank is at least as
    fast."""
    up, down, relays = list(links.up), list(links.down), list[RelayLine]()
    for (number, rank), passed, own in zip(routes.relays, forwarded, sent, strict=True):
        if rank is not None:
            up[rank], down[rank] = max(up[rank], passed, own), max(down[rank], passed)
        at = (passed, passed) if rank is None else (up[rank], down[rank])
        relays.append(RelayLine(number, rank, *at))
    return replace(links, up=tuple(up), down=tuple(down), relays=tuple(relays), relayed=routes.relayed)


def _round_trips(rows: Sequence[Sequence[float]], relayed: Sequence[Sequence[int]]) -> Matrix:
    """Combine both ends' measurements. Those of a relayed pair lead to the relay only, so they are added."""
    world = range(len(rows))
    return tuple(
        tuple(rows[a][b] + rows[b][a] if relayed[a][b] else max(rows[a][b], rows[b][a]) for b in world) for a in world
    )


def shared(sites: Sequence[Sequence[int]], between: Mapping[tuple[int, int], float]) -> Matrix:
    """Expand bandwidths between sites to a matrix over hosts; empty if no line is shared."""
    site_of = {host: place for place, site in enumerate(sites) for host in site}
    both = {**between, **{(b, a): rate for (a, b), rate in between.items()}}
    hosts = range(len(site_of))
    return _matrix([[both.get((site_of[a], site_of[b]), 0.0) for b in hosts] for a in hosts]) if between else ()


def meet(transport: Transport, flows: Sequence[Flow], nbytes: int) -> Mapping[Flow, float]:
    """Implement bandwidth_probe.Meet over a group's own connections. Operations there do not block each other, so each
    rank first waits for those in which it receives."""
    part, rank = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu"),), transport.rank
    upwards, downwards = [flow for flow in flows if flow[0] < flow[1]], [flow for flow in flows if flow[0] > flow[1]]
    waiting = [(flow, transport.begin(_mix(part, flow, rank))) for flow in (upwards, downwards) * 2]
    received = [wait for own, wait in waiting if any(receiver == rank for _, receiver in own)]
    moments = []
    for wait in received:
        wait()
        moments.append(time.perf_counter())
    for _, wait in waiting:
        if wait not in received:
            wait()
    own = torch.tensor([moments[1] - moments[0] if moments else 0.0], dtype=torch.float64, device="cpu")
    seconds = [float(remote) for (remote,) in transport.answer(AllGather((own,)))]
    return {flow: seconds[flow[1]] for flow in flows}


def _mix(part: tuple[torch.Tensor, ...], flows: Sequence[Flow], rank: int) -> NeighborAllGather:
    receivers = tuple(receiver for sender, receiver in flows if sender == rank)
    return NeighborAllGather(part, tuple((sender, 1.0) for sender, receiver in flows if receiver == rank), receivers)


def losses(
    sites: Sequence[Sequence[int]], round_trips: Matrix, found: Rates, packets: Sequence[Sequence[Packets]]
) -> Matrix:
    """Estimate the fraction of packets lost on each path, over all its pairs; 0 if too few packets were sent.

    A stream that saturates a line also loses packets. A path's loss is therefore bounded by the loss at which a stream
    could still reach the measured rate.
    """
    lost = [[0.0] * len(round_trips) for _ in round_trips]
    for here, there in combinations_with_replacement(range(len(sites)), 2):
        flows = [(a, b) for a in sites[here] for b in sites[there] if a != b]
        flows += [(b, a) for a, b in flows if here != there]
        sent, again = (sum(packets[a][b][which] for a, b in flows) for which in (0, 1))
        if again >= LOST_ENOUGH:
            most = min(ETHERNET.most_loss(round_trips[flow[0]][flow[1]], found.seen.get(flow, 0.0)) for flow in flows)
            for a, b in flows:
                lost[a][b] = lost[b][a] = bandwidth_probe.two_digits(min(again / max(sent, 1), most, MOST_LOST))
    return _matrix(lost)


def _gathered(transport: Transport, own: Any) -> list[Any]:
    return [json.loads(text) for text in transport.all_gather_text(json.dumps(own))]

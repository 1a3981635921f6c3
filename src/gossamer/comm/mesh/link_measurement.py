"""Link measurement: measures round trips, bandwidths and losses between workers when the group is formed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch

from gossamer.base.ops import AllGather, NeighborAllGather
from gossamer.base.transport import Transport
from gossamer.comm.mesh import bandwidth_probe
from gossamer.comm.mesh.bandwidth_probe import Flow, Rates
from gossamer.comm.network import Network
from gossamer.comm.network.site_detection import NOISE_SECONDS, measured, sites_of
from gossamer.comm.network.tcp_model import ETHERNET

Matrix = tuple[tuple[float, ...], ...]
LOST_ENOUGH = 5  # retransmitted packets that a loss estimate of a path requires
MOST_LOST = 0.5  # bound, because retransmissions include repeated SYNs, which are not counted as sent


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
    """

    round_trips: Matrix
    up: tuple[float, ...]
    down: tuple[float, ...]
    losses: Matrix
    shared: Matrix = ()
    ways: Matrix = ()

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
        )

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def network(self) -> Network:
        return measured(self.round_trips, self.up, self.down, self.losses, self.shared)

    def among(self, ranks: Sequence[int]) -> Links:
        """Return the links between some ranks."""

        def some(row: Sequence[float]) -> tuple[float, ...]:
            return tuple(row[rank] for rank in ranks)

        def between(matrix: Matrix) -> Matrix:
            return tuple(some(matrix[rank]) for rank in ranks)

        shared = between(self.shared) if self.shared else ()
        return Links(between(self.round_trips), some(self.up), some(self.down), between(self.losses), shared)


def _matrix(rows: Sequence[Sequence[float]]) -> Matrix:
    return tuple(map(tuple, rows))


Packets = tuple[int, int]  # (sent, retransmitted)


def measure(transport: Transport, round_trips: list[float], packets: Callable[[], list[Packets]]) -> Links:
    """Measure the links between all ranks. Collective call with equal results on all ranks.

    On a single machine, all ranks get the same bandwidth.

    Args:
        transport: Over this group's own connections.
        round_trips: Seconds to each rank, 0 if unknown.
        packets: Returns the packet counts to each rank.
    """
    seen = _symmetric(_gathered(transport, round_trips))
    sites = sites_of(seen)
    found = bandwidth_probe.find(sites, seen, lambda flows, nbytes: meet(transport, flows, nbytes))
    kinds = bandwidth_probe.alike if max(map(max, seen)) > NOISE_SECONDS else bandwidth_probe.all_alike
    up = kinds([found.up(rank) for rank in range(transport.world)])
    down = kinds([found.down(rank) for rank in range(transport.world)])
    lost = losses(sites, seen, found, _gathered(transport, packets()))
    between = bandwidth_probe.find_shared(sites, seen, lambda flows, nbytes: meet(transport, flows, nbytes))
    return Links(seen, up, down, lost, shared(sites, between))


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


def _symmetric(rows: Sequence[Sequence[float]]) -> Matrix:
    world = range(len(rows))
    return tuple(tuple(max(rows[a][b], rows[b][a]) for b in world) for a in world)

"""Meetings of the bandwidth probe over wires in virtual time, where the truth is known."""

from collections import defaultdict

from gossamer.comm.network import Host, Network, Path
from gossamer.comm.network.cost.message_schedule import Collect, Send
from gossamer.comm.network.cost.message_simulator import Wires

NEAR = Path(round_trip_seconds=0.001)


class Noted(Wires):
    """Wires that remember when messages came."""

    def __init__(self, network):
        super().__init__(network)
        self.came = defaultdict(list)

    def arrive(self, sender, receiver, nbytes, begin, left):
        moment = super().arrive(sender, receiver, nbytes, begin, left)
        self.came[sender, receiver].append(moment)
        return moment


class Meeting:
    """bandwidth_probe.Meet in virtual time; and what it costs, with a hop to tell everybody."""

    def __init__(self, network):
        self.network, self.wires, self.now, self.flows = network, Noted(network), 0.0, []

    def __call__(self, flows, nbytes):
        world = range(self.wires.world)
        parts = [
            [iter([Send(to, nbytes, eager=True) for _ in range(2) for sender, to in flows if sender == rank])]
            + [iter([Collect(of), Collect(of)]) for of, receiver in flows if receiver == rank]
            for rank in world
        ]
        ends = self.wires.run([[*each] for each in _aligned(parts)], [self.now] * len(world))
        self.now = max(ends) + max(self.network.path(a, b).round_trip_seconds for a in world for b in world) / 2
        self.flows += flows
        return {flow: self.wires.came[flow][-1] - self.wires.came[flow][-2] for flow in flows}


def _aligned(parts):
    """One exchange for all ranks: each says what it sends, then hears."""
    return [[iter([move for moves in part for move in moves])] for part in parts]


def round_trips(network):
    world = range(len(network.hosts))
    return [[network.path(a, b).round_trip_seconds if a != b else 0.0 for b in world] for a in world]


def network_of(*lines, path=NEAR):
    hosts = tuple(Host(up_bits_per_second=up * 1e6, down_bits_per_second=down * 1e6) for up, down in lines)
    return Network(hosts=hosts, default=path)

"""A worker's machine in virtual time: several peers that share its fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gossamer.base.peer_ops import WORKER, Peer
from gossamer.comm.simulation.faulty_network import Cut, Fault, VirtualNetwork

TRAINER, CALLER = "trainer", "caller"
ROLES = (WORKER, TRAINER, CALLER)  # who answers, who trains, who asks


def of_machines(net: VirtualNetwork) -> VirtualNetwork:
    """The same, where a fault of a worker is one of all that runs on its machine."""
    return replace(net, faults=tuple(each for fault in net.faults for each in _of_machines(fault)))


def _of_machines(fault: Fault) -> Iterator[Fault]:
    match fault:
        case Cut(peers_a, peers_b):
            yield replace(fault, peers_a=_every_role(peers_a), peers_b=_every_role(peers_b))
        case _:
            yield from (replace(fault, peer=peer) for peer in _every_role([fault.peer]))


def _every_role(peers: Sequence[Peer]) -> tuple[Peer, ...]:
    return tuple(Peer(role, peer.number) for peer in peers for role in ROLES)

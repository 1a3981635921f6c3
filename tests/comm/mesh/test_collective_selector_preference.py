import pytest
import torch
from support.mesh_group import Group
from support.virtual_workers import heard

from gossamer import events
from gossamer.base.ops import AllReduceMean
from gossamer.comm.mesh.collective_selector import prefer_collective
from gossamer.comm.network import read_network
from gossamer.comm.simulated import SimulatedGroup
from gossamer.comm.throttled import ThrottledTransport


def picked(group):
    """By which collectives a mean goes now, as the ranks tell."""
    with heard(events.CollectivePicked) as found:
        means = group.answers([AllReduceMean(torch.full((64,), float(rank))) for rank in range(2)])
    assert all(torch.equal(mean, torch.full((64,), 0.5)) for mean in means)
    return {each.collective for each in found}


def test_means_go_by_another_collective_from_now_on():
    with Group(2) as group:
        picked(group)
        for wish, name in (("ring", "RingAllReduce"), ("direct", "DirectAllReduce")):
            for transport in group.transports:
                prefer_collective(ThrottledTransport(transport, read_network("10gbit", 2)), wish)
            assert {each.partition("(")[0] for each in picked(group)} == {name}


def test_an_invalid_collective_is_refused():
    with Group(2) as group, pytest.raises(ValueError, match="unknown collective"):
        prefer_collective(group.transports[0], "triangle")


def test_a_transport_without_a_choice_stays_as_it_is():
    prefer_collective(SimulatedGroup(2).transports[0], "ring")

from functools import partial

import numpy as np
import pytest
import torch
from support.nightly import nightly, once_each

from gossamer.algorithms.collectives import COLLECTIVES, DirectAllReduce, HierarchicalAllReduce
from gossamer.algorithms.topologies import Exponential, Ring, Torus
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, InGroup, NeighborAllGather
from gossamer.comm.network import Host, Network, read_network
from gossamer.comm.network.cost import message_schedule, op_cost, representative_cost
from gossamer.comm.network.cost.cheapest_collective import chosen_on_uniform_links, fastest, is_alike, most_others
from gossamer.comm.network.cost.op_cost import NetworkCost, op_costs
from gossamer.comm.network.cost.representative_cost import RepresentativeCost, RepresentativeRank, UniformNetwork
from gossamer.comm.network.parse import NetworkError

NETWORKS = ("1gbit,1ms", "100mbit,50ms", "10gbit,0s", "100mbit,20ms,loss=0.1%", "1gbit,10ms,jitter=2ms")
WORLDS = [*range(2, 10), 16, 17, *nightly(*range(10, 16), *range(18, 34))]
ITEMS = (1, 300, 20_000)  # of a piece
RESTS = (0.0, 0.5, 0.0)  # seconds before each operation


@pytest.fixture(autouse=True)
def whole_pieces(monkeypatch):
    monkeypatch.setattr(message_schedule, "MOST_MESSAGES", 1)


def floats(numel):
    return torch.empty(numel, device="meta")


def both(network, wish="auto"):
    uniform = UniformNetwork.of(network)
    return NetworkCost(network, collective=wish), RepresentativeCost(uniform, partial(chosen_on_uniform_links, wish))


def ratios(ops, network, wish="auto", representative=None):
    """The representative's moment over that of all ranks, after each operation of several."""
    played, alike = both(network, wish)
    alike, world, now, then = representative or alike, len(network.hosts), 0.0, 0.0
    for op_of, rest in zip(ops * len(RESTS), np.repeat(RESTS, len(ops)), strict=True):
        now = max(played.answer([op_of(rank) for rank in range(world)], [now + rest] * world))
        (then,) = alike.answer([op_of(0)], [then + rest])
        yield then / now


def always(op):
    return lambda rank: op


def exact_ops(world, items):
    return [always(AllReduceMean(floats(items * world))), always(AllGather((floats(items),)))]


@once_each(
    "text, wish, worlds",
    NETWORKS,
    ["direct", "ring"],
    [(2, 3, 4, 5, 8, 9), (6, 7, 16, 33)],
    not_by_day=[(6, 7, 16, 33)],
)
def test_one_rank_tells_what_all_would_where_all_look_alike(text, wish, worlds):
    for world in worlds:
        for items in ITEMS:
            found = list(ratios(exact_ops(world, items), read_network(text, world), wish))
            assert found == pytest.approx([1.0] * len(found), rel=1e-9), (world, items)


@pytest.mark.parametrize("world", WORLDS)
def test_in_worlds_of_every_size(world):
    for text in NETWORKS[:2]:
        ops = [always(AllToAll(((floats(40),),) * world)), always(AllReduceMean(floats(7 * world)))]
        found = list(ratios(ops, read_network(text, world), "direct"))
        assert found == pytest.approx([1.0] * len(found), rel=1e-9)


def check_mirrored(representative):
    """A world of 12, two operations that leave lines and connections as other ones would not."""
    network = read_network("100mbit,20ms", 12)
    found = list(ratios(exact_ops(12, 5000), network, "direct", representative(network)))
    assert found == pytest.approx([1.0] * len(found), rel=1e-9)


def with_rank(kind):
    def made(network):
        cost = RepresentativeCost(UniformNetwork.of(network), partial(chosen_on_uniform_links, "direct"))
        cost._rank = kind(UniformNetwork.of(network), cost._rank._tcp)
        return cost

    return made


class Forgetful(RepresentativeRank):
    """Connections begin anew with every exchange."""

    def exchange(self, peers, nbytes, now, messages=1):
        self.__init__(self.network, self._tcp)
        return super().exchange(peers, nbytes, now, messages)


class OneWay(RepresentativeRank):
    """Hears of one peer what it sends to all."""

    def exchange(self, peers, nbytes, now, messages=1):
        return super().exchange(peers[:1], nbytes, now, messages)


def test_a_wrong_mirror_is_found():
    check_mirrored(with_rank(RepresentativeRank))
    for broken in (Forgetful, OneWay):
        with pytest.raises(AssertionError):
            check_mirrored(with_rank(broken))


@pytest.mark.parametrize("topology", [Ring(), Torus(), Exponential()])
def test_graphs_that_look_alike_from_every_rank(topology):
    world = 16

    def op(rank):
        edges = topology.weights(rank, world, 0)
        return NeighborAllGather((floats(3000),), edges, topology.sends_to(rank, world, 0))

    found = list(ratios([op], read_network("100mbit,20ms", world)))
    assert found == pytest.approx([1.0] * len(found), rel=1e-9)


def test_groups_of_neighbors():
    def op(rank):
        return InGroup(tuple(range(rank // 4 * 4, rank // 4 * 4 + 4)), AllGather((floats(3000),)))

    found = list(ratios([op], read_network("100mbit,20ms", 16)))
    assert found == pytest.approx([1.0] * len(found), rel=1e-9)


@pytest.mark.parametrize("worlds", [(4, 7, 8, 12), *nightly(((16, 33),))], ids=max)
def test_where_ranks_differ_a_round_ends_with_its_last_piece(worlds):
    """Measured bounds: against every rank's messages, one after the other, without loss."""
    bounds = {"halving": (0.83, 1.92), "hierarchical(4)": (0.59, 1.13)}
    for wish, (least, most) in bounds.items():
        for text in ("1gbit,1ms", "100mbit,50ms", "10gbit,0s"):
            for world in worlds:
                for items in ITEMS[1:]:
                    op = always(AllReduceMean(floats(items * world)))
                    found = list(ratios([op], read_network(text, world), wish))
                    assert all(least <= each <= most for each in found), (wish, text, world, items, found)


def test_pieces_count_as_long_as_the_longest():
    network = read_network("1gbit,1ms", 7)
    found = list(ratios([always(AllReduceMean(floats(7 * 3000 + 1)))], network, "direct"))
    assert all(1 <= each <= 1.001 for each in found)


@pytest.mark.parametrize("world", WORLDS)
def test_the_busiest_rank_sends_as_much_as_any(world):
    for table in (
        *(COLLECTIVES[name]() for name in ("ring", "halving", "tree", "direct")),
        HierarchicalAllReduce(per_node=4),
    ):
        sent = [table.bytes_sent(rank, world, 3 * table.pieces(world), 4) for rank in range(world)]
        assert sent[table.busiest(world)] == max(sent), table
        others = [len({hop.peer for hop in table.hops(rank, world) if hop.does == "send"}) for rank in range(world)]
        assert most_others(table, world) == max(others), table


@pytest.mark.parametrize("collective", ["auto", *COLLECTIVES])
def test_the_mean_of_an_empty_tensor_has_a_cost(collective):
    empty, network = AllReduceMean(torch.empty(0)), read_network("100mbit,20ms", 40)
    (end,) = set(op_costs(network, collective=collective).answer([empty] * 40, [0.0] * 40))
    assert 0 < end < op_costs(network, collective=collective).answer([AllReduceMean(torch.empty(2**22))], [0.0])[0]


def test_no_ring_of_ten_thousand_is_chosen():
    """Few bytes would pay for every hop; many are sent twice by anybody, in a ring in 20,000 rounds."""
    network = read_network("1gbit,1ms", 10_000)
    assert fastest(40, 4, network) == fastest(400_000_000, 4, network) == DirectAllReduce()


def test_a_ring_of_ten_thousand_pays_for_every_hop():
    network = read_network("1gbit,1ms", 10_000)
    (end,) = op_costs(network, collective="ring").answer([AllReduceMean(floats(10_000))], [0.0])
    assert end == pytest.approx(2 * 9999 * 0.0005, rel=0.01)


def test_networks_that_are_not_alike_are_played_up_to_a_size():
    hosts = [Host(up_bits_per_second=rate, down_bits_per_second=1e9) for rate in (1e9, 1e8)]
    few, many = (Network(hosts=tuple(hosts * count)) for count in (20, 200))
    assert not is_alike(few)
    assert isinstance(op_costs(few), NetworkCost)
    with pytest.raises(NetworkError, match="unequal hosts"):
        op_costs(many)
    with pytest.raises(NetworkError, match="engine"):
        op_costs(read_network("1gbit", 10_000), collective="engine")
    assert isinstance(op_costs(read_network("1gbit", 10_000)), representative_cost.RepresentativeCost)
    assert op_cost.MOST_UNLIKE < 400

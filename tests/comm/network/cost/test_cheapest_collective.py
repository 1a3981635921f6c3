from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.algorithms.collectives import (
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.comm.mesh.collective_selector import REQUESTABLE, CollectiveSelector
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.cost import cheapest_collective
from gossamer.comm.network.cost.cheapest_collective import (
    candidates,
    chosen_collective,
    fastest,
    most_others,
    order_of,
    ranks_per_site,
    table_seconds,
)
from gossamer.comm.network.cost.message_schedule import table_moves
from gossamer.comm.network.cost.message_simulator import Wires

OCEAN = {frozenset(("w", "e")): Path(round_trip_seconds=0.08)}


def sites(names, paths=OCEAN, **rates):
    host = {"up_bits_per_second": 200e6, "down_bits_per_second": 200e6} | rates
    return Network(hosts=tuple(Host(site=name, **host) for name in names), paths=paths)


NETWORKS = [
    read_network("1gbit", 4),
    read_network("100mbit,20ms", 3),
    read_network("100mbit,20ms", 8),
    read_network("20mbit,80ms,loss=0.1%", 4),
    sites("wwee"),
    sites("wewewe"),
    sites("wwwee"),
]


def check_fastest(choice):
    """Nothing else that is worth a price is faster by more than a rounding."""
    for network in NETWORKS:
        for nbytes in (40, 400_000, 2_000_000):
            mine = table_seconds(choice(nbytes, 4, network), nbytes, 4, network)
            for other in candidates(network):
                assert mine <= 1.001 * table_seconds(other, nbytes, 4, network)


def test_the_fastest_is_the_fastest():
    check_fastest(fastest)


@pytest.mark.parametrize("always", [DirectAllReduce(), RingAllReduce(), TreeAllReduce(), HalvingDoubling()], ids=repr)
def test_no_collective_is_always_the_fastest(always):
    with pytest.raises(AssertionError):
        check_fastest(lambda *_: always)


SECONDS = st.sampled_from([0.0, 1e-4, 0.002, 0.02, 0.3])
RATES = st.floats(4, 11).map(lambda exponent: 10**exponent)


@given(
    rates=st.lists(RATES, min_size=4, max_size=4) | RATES.map(lambda rate: [rate] * 4),
    shared=st.none() | RATES,
    path=st.builds(Path, round_trip_seconds=SECONDS, jitter_seconds=SECONDS, loss=st.sampled_from([0.0, 0.001, 0.03])),
    numel=st.floats(0, 6).map(lambda exponent: int(10**exponent)),
)
def test_between_two_ranks_the_choice_is_the_simulated_one(rates, shared, path, numel):
    hosts = [
        Host(up_bits_per_second=up, down_bits_per_second=down, site=site)
        for up, down, site in zip(rates[:2], rates[2:], "we", strict=True)
    ]
    network = Network(hosts=tuple(hosts), paths={frozenset("we"): replace(path, bits_per_second=shared)})
    assert fastest(4 * numel, 4, network) == fastest(4 * numel, 4, network, among=candidates(network))


def test_few_bytes_between_two_unequal_ranks_may_go_by_a_tree():
    slow_up = Host(up_bits_per_second=1e5, down_bits_per_second=1e7)
    slow_down = Host(up_bits_per_second=1e7, down_bits_per_second=1e6)
    network = Network(hosts=(slow_up, slow_down))
    assert fastest(16, 4, network) == fastest(16, 4, network, among=candidates(network)) == TreeAllReduce()


def test_between_two_ranks_nothing_is_simulated(monkeypatch):
    monkeypatch.setattr(cheapest_collective, "table_seconds", None)
    assert fastest(1_000_000, 4, read_network("1gbit,1ms", 2)) == DirectAllReduce()


def test_few_bytes_go_straight_where_round_trips_are_long():
    assert fastest(40, 4, read_network("100mbit,20ms", 8)) == DirectAllReduce()


def test_nodes_pay_where_many_ranks_share_an_ocean():
    ocean = {frozenset(("w", "e")): Path(round_trip_seconds=0.08, bits_per_second=1e8)}
    assert fastest(1_000_000, 4, sites("wwwweeee", ocean)) == HierarchicalAllReduce(per_node=4)
    assert fastest(1_000_000, 4, sites("wwwweeee")) == DirectAllReduce()


def check_streams_from_one_to_one(choice):
    """Of tables that take equally long, where lines are short, a ring, in which everybody sends to one other."""
    network = read_network("1gbit", 4)
    prices = {each.name: table_seconds(each, 8_000_000, 4, network) for each in candidates(network)}
    assert prices["halving"] == pytest.approx(prices["direct"])
    assert prices["halving"] == pytest.approx(prices["ring"])
    assert [most_others(each, 4) for each in candidates(network)] == [3, 2, 1, 2]
    assert choice(8_000_000, 4, network) == RingAllReduce()
    assert choice(100_000_000, 4, read_network("1gbit,0.2ms", 4)) == RingAllReduce()
    assert choice(8_000_000, 4, network, [HalvingDoubling(), DirectAllReduce()]) == HalvingDoubling()


def test_of_equals_the_one_in_which_a_rank_sends_to_the_fewest_others():
    check_streams_from_one_to_one(fastest)


def check_many_streams(choice):
    """Where round trips are long, of tables that take equally long the one that loss would harm least."""
    network, lossy = read_network("20mbit,10ms", 4), read_network("20mbit,10ms,loss=2%", 4)
    prices = [table_seconds(each, 100_000_000, 4, network) for each in (DirectAllReduce(), RingAllReduce())]
    assert prices[0] == pytest.approx(prices[1], rel=0.001)
    assert table_seconds(RingAllReduce(), 8_000_000, 4, lossy) > 1.5 * table_seconds(
        DirectAllReduce(), 8_000_000, 4, lossy
    )
    assert choice(100_000_000, 4, network, [RingAllReduce(), DirectAllReduce()]) == DirectAllReduce()


def test_of_equals_on_long_paths_the_one_with_the_most_streams():
    check_many_streams(fastest)


@pytest.mark.parametrize(
    ("check", "always"),
    [(check_many_streams, RingAllReduce()), (check_streams_from_one_to_one, DirectAllReduce())],
    ids=["many", "one"],
)
def test_neither_rule_for_equals_is_right_everywhere(check, always):
    with pytest.raises(AssertionError):
        check(lambda *_: always)


def test_those_alone_go_straight():
    assert fastest(16_000_000, 4, read_network("1gbit", 1), [RingAllReduce()]) == DirectAllReduce()


def test_candidates_may_be_given():
    assert fastest(40, 4, read_network("100mbit,20ms", 8), [RingAllReduce(), TreeAllReduce()]) == TreeAllReduce()


def test_a_price_is_asked_once(monkeypatch):
    network = sites("wwee", up_bits_per_second=123e6)
    found = fastest(4444, 4, network)
    monkeypatch.setattr(cheapest_collective, "table_seconds", None)
    assert fastest(4444, 4, Network(hosts=network.hosts, paths=dict(network.paths), text="another name")) == found
    with pytest.raises(TypeError):
        fastest(4448, 4, network)


def check_rested(price):
    """Ten megabytes keep the line busy until the last have to travel. A window that was open is an eighth after a rest
    of a second, with 0.28 s to a timeout, and needs some round trips; the initial one would need twice as many."""
    network = read_network("100mbit,80ms", 2)
    line = 10e6 * 8 / 100e6 * 1526 / 1448
    assert price(DirectAllReduce(), 10_000_000, 4, network, rest_seconds=0.0) == pytest.approx(line + 0.04, rel=0.01)
    rested = price(DirectAllReduce(), 10_000_000, 4, network)
    assert line + 0.04 + 0.08 < rested < line + 0.04 + 0.24
    assert rested == price(DirectAllReduce(), 10_000_000, 4, network, rest_seconds=1.05)
    assert rested < price(DirectAllReduce(), 10_000_000, 4, network, rest_seconds=30.0) - 0.08


def test_connections_have_rested_since_they_carried_as_much():
    check_rested(table_seconds)


def at_first(collective, nbytes, itemsize, network, rest_seconds=0.0):
    moves = [table_moves(collective, rank, 2, nbytes // itemsize, itemsize) for rank in range(2)]
    return max(Wires(network).run(moves, [0.0, 0.0]))


def test_connections_that_are_new_or_always_open_are_noticed():
    with pytest.raises(AssertionError):
        check_rested(at_first)
    with pytest.raises(AssertionError):
        check_rested(lambda *what, rest_seconds=0.0: table_seconds(*what, rest_seconds=0.0))


@pytest.mark.parametrize(
    ("names", "per_node"),
    [("wwee", 2), ("wweewwee", 2), ("wwwee", 3), ("wwee" + "w", 2), ("wweee", 0), ("wewe", 0), ("wwww", 0), ("w", 0)],
)
def test_sites_are_nodes_where_they_are_blocks_of_neighbours(names, per_node):
    assert ranks_per_site(sites(names)) == per_node
    nodes = [each.per_node for each in candidates(sites(names)) if each.name == "hierarchical"]
    assert nodes == [per_node] * bool(per_node)


def test_a_middle_block_that_is_smaller_is_no_node():
    assert ranks_per_site(sites("wwwee" + "www")) == 0


def test_rings_follow_the_nearest_that_is_left():
    assert order_of(sites("wweewwee")) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert order_of(sites("wewe")) == (0, 2, 1, 3)
    assert order_of(sites("wwee")) is None
    assert order_of(read_network("1gbit,1ms", 5)) is None
    assert RingAllReduce(order=(0, 2, 1, 3)) in candidates(sites("wewe"))
    assert RingAllReduce() in candidates(sites("wwee"))


def test_of_equally_near_ones_the_faster_line():
    slow, fast = (Host(up_bits_per_second=rate, down_bits_per_second=rate) for rate in (1e6, 1e9))
    assert order_of(Network(hosts=(fast, slow, fast, fast))) == (0, 2, 3, 1)


# -- wishes


def links_of(network):
    """What a group that measured this network without error would know of it."""
    ranks = range(len(network.hosts))
    pairs = [[network.path(a, b) if a != b else Path() for b in ranks] for a in ranks]
    return Links(
        tuple(tuple(path.round_trip_seconds for path in row) for row in pairs),
        tuple(host.up_bits_per_second for host in network.hosts),
        tuple(host.down_bits_per_second for host in network.hosts),
        tuple(tuple(path.loss for path in row) for row in pairs),
    )


def check_wishes(come_to):
    """What a session takes is what is estimated for the links that it has measured."""
    for network in NETWORKS:
        links = links_of(network)
        assert [host.up_bits_per_second for host in links.network.hosts] == list(links.up)
        ranks = tuple(range(len(links.round_trips)))
        for wish in (*REQUESTABLE, "hierarchical(2)"):
            if wish != "engine":
                assert come_to(wish, 400_000, 4, links.network) == CollectiveSelector(wish, links)(400_000, 4, ranks)


def test_a_wish_comes_to_what_the_mesh_picks():
    check_wishes(chosen_collective)


@pytest.mark.parametrize(
    "broken", [lambda *_: RingAllReduce(), lambda wish, *rest: chosen_collective(wish.partition("(")[0], *rest)]
)
def test_other_readings_of_a_wish_are_noticed(broken):
    with pytest.raises(AssertionError):
        check_wishes(broken)


def test_wishes_are_names():
    network = sites("wewe")
    assert chosen_collective("ring", 40, 4, network) == RingAllReduce(order=(0, 2, 1, 3))
    assert chosen_collective("halving", 40, 4, network) == HalvingDoubling()
    assert chosen_collective("hierarchical(4)", 40, 4, network) == HierarchicalAllReduce(per_node=4)
    assert chosen_collective("hierarchical", 40, 4, sites("wwwee")) == HierarchicalAllReduce(per_node=3)
    assert chosen_collective("hierarchical", 40, 4, read_network("1gbit", 4)) == HierarchicalAllReduce(per_node=4)
    assert chosen_collective("auto", 40, 4, network) == fastest(40, 4, network)
    with pytest.raises(ValueError, match="'rign': use auto, or one of ring, "):
        chosen_collective("rign", 40, 4, network)


@pytest.mark.parametrize(
    "wish", ["auto", "ring", "hierarchical(2)", "tree", RingAllReduce(), TreeAllReduce()], ids=repr
)
def test_half_precision_goes_straight_whatever_is_asked_for(wish):
    assert chosen_collective(wish, 16_000_000, 2, read_network("1gbit", 4)) == DirectAllReduce()
    assert chosen_collective(wish, 16_000_000, 8, read_network("1gbit", 4)) != DirectAllReduce()


def test_a_table_may_be_a_wish():
    assert chosen_collective(RingAllReduce(order=(1, 0, 2)), 40, 4, read_network("1gbit", 3)) == RingAllReduce(
        order=(1, 0, 2)
    )

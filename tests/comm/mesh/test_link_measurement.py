"""Link measurement: what is known of links, how it is written, and how it is found out."""

import json
import pathlib
import socket
from dataclasses import replace

import pytest
import torch
from support.mesh_group import Group

from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean
from gossamer.comm.mesh.bandwidth_probe import Rates
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.link_measurement import MOST_LOST, Links, losses, measure, meet, shared
from gossamer.comm.mesh.tcp_info import packets, round_trip_seconds
from gossamer.comm.network import Path, read_network
from gossamer.comm.network.cost.cheapest_collective import candidates, table_seconds
from gossamer.comm.network.tcp_model import ETHERNET
from gossamer.comm.simulated import SimulatedGroup

ROOT = pathlib.Path(__file__).resolve().parents[3]
FAR = 0.08
TRIPS = tuple(tuple(0.0 if a == b else 0.001 if a % 2 == b % 2 else FAR for b in range(4)) for a in range(4))
LOST = tuple(tuple(0.01 * ((a - b) % 2) for b in range(4)) for a in range(4))
LINKS = Links(TRIPS, (1e6, 2e6, 3e6, 4e6), (5e6, 6e6, 7e6, 8e6), LOST)

compiled = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


def check_text(of):
    assert of(LINKS.text) == LINKS
    assert of(json.dumps([TRIPS, 2e8])) == Links.alike(TRIPS, 2e8)
    assert hash(of(LINKS.text)) == hash(LINKS)


def test_what_was_written_is_read_also_from_when_all_had_one_rate():
    check_text(Links.of)


def swapped(text):
    found = Links.of(text)
    return Links(found.round_trips, found.down, found.up, found.losses)


@pytest.mark.parametrize("broken", [swapped, lambda text: Links(**json.loads(text))], ids=["swapped", "lists"])
def test_what_is_read_otherwise_is_noticed(broken):
    with pytest.raises((AssertionError, TypeError)):
        check_text(broken)


def test_those_among_some_are_those_between_them():
    some = LINKS.among((1, 2))
    assert some == Links(((0.0, FAR), (FAR, 0.0)), (2e6, 3e6), (6e6, 7e6), ((0.0, 0.01), (0.01, 0.0)))


def test_they_make_a_network():
    network = LINKS.network
    assert [host.up_bits_per_second for host in network.hosts] == list(LINKS.up)
    assert [host.down_bits_per_second for host in network.hosts] == list(LINKS.down)
    assert network.path(0, 1) == Path(round_trip_seconds=FAR, loss=0.01)
    assert network.path(0, 2) == Path(round_trip_seconds=0.001)


# -- lines that sites share

SHARED = tuple(tuple(1e8 * ((a - b) % 2) for b in range(4)) for a in range(4))


def test_what_sites_share_is_written_read_and_a_line_of_the_network():
    assert shared([[0, 2], [1, 3]], {(0, 1): 1e8}) == SHARED
    assert shared([[0, 2], [1, 3]], {}) == ()
    links = replace(LINKS, shared=SHARED)
    assert Links.of(links.text) == links
    before = json.loads(links.text)
    del before["shared"]  # as it was written when nobody looked
    assert Links.of(json.dumps(before)) == LINKS
    assert links.network.path(0, 1) == Path(round_trip_seconds=FAR, loss=0.01, bits_per_second=1e8)
    assert links.network.path(0, 2).bits_per_second is None
    assert links.among((0, 1, 3)).shared == ((0.0, 1e8, 1e8), (1e8, 0.0, 0.0), (1e8, 0.0, 0.0))
    assert links.among((0, 2)).network.is_uniform is False  # unlike rates; and no line between two sites


def check_pick(links):
    """`auto` on what was measured, beside the best table on the network as it is."""
    network = read_network(str(ROOT / "examples/networks/two-offices.toml"), 4)
    picked = CollectiveSelector("auto", links)(4_000_000, 4, (0, 1, 2, 3))
    prices = {each: table_seconds(each, 4_000_000, 4, network) for each in candidates(network)}
    assert prices[picked] < 1.05 * min(prices.values())


def test_the_choice_is_the_best_on_a_line_that_two_offices_share():
    trips = tuple(tuple(0.0002 if a // 2 == b // 2 else 0.03 for b in range(4)) for a in range(4))
    links = replace(Links.alike(trips, 1e9), shared=shared([[0, 1], [2, 3]], {(0, 1): 1e8}))
    check_pick(links)
    with pytest.raises(AssertionError):  # as long as nobody looked
        check_pick(replace(links, shared=()))


# -- loss


def lost_of(sent, again, rate=0.0):
    """Two near, one far: every pair has sent so many packets, those to the far one some of them again."""
    trips = ((0.0, 0.001, 0.1), (0.001, 0.0, 0.1), (0.1, 0.1, 0.0))
    counts = [[(sent, again if 2 in (a, b) else 0) for b in range(3)] for a in range(3)]
    return losses([[0, 1], [2]], trips, Rates(3, {(0, 2): rate} if rate else {}), counts)


def test_a_path_loses_what_all_its_pairs_lost_together():
    assert lost_of(1000, 3) == ((0.0, 0.0, 0.003), (0.0, 0.0, 0.003), (0.003, 0.003, 0.0))


def test_a_few_packets_tell_nothing():
    assert lost_of(1000, 1) == lost_of(0, 0) == ((0.0,) * 3,) * 3


def test_a_path_that_repeated_more_than_it_sent_is_still_a_path():
    """Calls that nobody answered were repeated, and are not among what was sent."""
    assert lost_of(1, 20)[0][2] == lost_of(0, 20)[0][2] == MOST_LOST
    assert Links(TRIPS, (1e6,) * 4, (1e6,) * 4, ((MOST_LOST,) * 4,) * 4).network.path(0, 1).loss < 1


def test_a_stream_that_was_fast_did_not_lose_as_much():
    rate = ETHERNET.most_bits_per_second(Path(round_trip_seconds=0.1, loss=0.01))
    assert lost_of(1000, 50, rate)[0][2] == pytest.approx(0.01, rel=0.05)
    assert lost_of(1000, 50)[0][2] == 0.05


# -- over connections


@compiled
def test_what_pairs_see_over_loopback_is_known_to_all_alike():
    with Group(3) as group:
        found = group.all(lambda rank: meet(group.transports[rank], [(0, 1), (1, 0), (2, 0)], 10_000))
        assert found[0] == found[1] == found[2]
        assert found[0].keys() == {(0, 1), (1, 0), (2, 0)}
        assert all(0 <= seconds < 10 for seconds in found[0].values())


@compiled
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_measure_the_same(world):
    with Group(world) as group:
        sockets = group.sockets
        found = group.all(lambda rank: measure(group.transports[rank], [1e-5] * world, lambda: packets(sockets[rank])))
        assert all(each == found[0] for each in found)
        assert all(rate > 1e6 for rate in found[0].up + found[0].down)
        assert Links.of(found[0].text) == found[0]
        assert found[0].network.is_uniform
        heard = group.answers(
            [AllReduceMean(torch.full((5,), float(rank))) for rank in range(world)]
        )  # ops go on as before
        assert all(torch.equal(each, torch.full((5,), (world - 1) / 2)) for each in heard)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not count")
def test_the_kernel_counts_packets():
    with Group(2) as group:
        ours = group.sockets[0]
        before, _ = packets(ours)[1]
        assert packets(ours)[0] == (0, 0)
        group.all(lambda rank: meet(group.transports[rank], [(0, 1)], 100_000))
        after, again = packets(ours)[1]
        assert after > before
        assert again <= after


def test_a_group_in_one_process_meets_too():
    ranks = SimulatedGroup(1).transports
    assert measure(ranks[0], [0.0], lambda: [(0, 0)]) == Links.alike(((0.0,),), 0.0)


class NoTcp:
    """What a kernel that only imitates Linux says."""

    def getsockopt(self, *_):
        raise OSError("protocol not available")


def test_a_kernel_that_does_not_tell_is_no_failure():
    assert packets([NoTcp(), None]) == [(0, 0), (0, 0)]
    assert round_trip_seconds(NoTcp()) == 0.0

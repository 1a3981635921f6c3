"""Bandwidth probe: what pairs of ranks find out of lines, over wires in virtual time, where the truth is known."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from support.virtual_meetings import NEAR, Meeting, network_of, round_trips

from gossamer.comm.mesh import bandwidth_probe
from gossamer.comm.mesh.bandwidth_probe import (
    Rates,
    alike,
    all_alike,
    apart,
    find,
    find_shared,
    find_total,
    first_pairs,
    next_pairs,
    see,
    site_meetings,
)
from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.site_detection import sites_of


def found_in(network, look=find):
    seconds, meeting = round_trips(network), Meeting(network)
    rates = look(sites_of(seconds), seconds, meeting)
    world = range(len(network.hosts))
    return (
        alike([rates.up(rank) for rank in world]),
        alike([rates.down(rank) for rank in world]),
        meeting,
    )


def once(sites, seconds, meet):
    """Nobody meets twice: whoever met a slow host seems slow."""
    found = Rates(len(seconds))
    found.seen |= see([flow for a, b in first_pairs(sites, 0) for flow in ((a, b), (b, a))], seconds, meet, 2**14)[0]
    return found


UNEQUAL = {
    "alike": ([(100, 100)] * 4, [100] * 4, [100] * 4),
    "one slow": ([(1000, 1000)] * 3 + [(100, 100)], [1000] * 3 + [100], [1000] * 3 + [100]),
    "one slow, first": ([(10, 10)] + [(100, 100)] * 4, [10] + [100] * 4, [10] + [100] * 4),
    "two slow together": ([(10, 10)] * 2 + [(100, 100)] * 4, [10] * 2 + [100] * 4, [10] * 2 + [100] * 4),
    "half": ([(10, 10), (100, 100)] * 4, [10, 100] * 4, [10, 100] * 4),
    "sends slowly": ([(5, 50)] + [(50, 50)] * 3, [5] + [50] * 3, [50] * 4),
    "hears slowly": ([(50, 50)] * 3 + [(50, 5)], [50] * 4, [50] * 3 + [5]),
    "phones": ([(10, 40)] * 4 + [(1, 5)] * 2, [10] * 4 + [1] * 2, [10] * 4 + [5] * 2),
    "homes": ([(20, 100)] * 4, [20] * 4, [20] * 4),  # nobody sends so much that more could be heard
}


def check_lines(case, look=find):
    lines, ups, downs = UNEQUAL[case]
    up, down, _ = found_in(network_of(*lines), look)
    assert up == pytest.approx([1e6 * rate for rate in ups], rel=0.06)
    assert down == pytest.approx([1e6 * rate for rate in downs], rel=0.06)


@pytest.mark.parametrize("case", UNEQUAL)
def test_lines_are_as_they_are(case):
    check_lines(case)


@pytest.mark.parametrize("case", ["one slow", "sends slowly", "hears slowly", "half"])
def test_whoever_met_a_slow_one_only_would_seem_slow(case):
    with pytest.raises(AssertionError):
        check_lines(case, once)


def check_open(round_trip_seconds):
    up, down, _ = found_in(network_of(*[(100, 100)] * 4, path=Path(round_trip_seconds=round_trip_seconds)))
    assert up + down == pytest.approx([100e6] * 8, rel=0.03)


@pytest.mark.parametrize("round_trip_seconds", [0.02, 0.1])
@pytest.mark.parametrize("first_bytes", [bandwidth_probe.FIRST_BYTES, 2**18])
def test_windows_are_open_when_a_long_path_is_measured(first_bytes, round_trip_seconds, monkeypatch):
    monkeypatch.setattr(bandwidth_probe, "FIRST_BYTES", first_bytes)
    check_open(round_trip_seconds)


def test_what_was_too_short_measures_a_window(monkeypatch):
    monkeypatch.setattr(bandwidth_probe, "FIRST_BYTES", 2**18)
    monkeypatch.setattr(bandwidth_probe, "LONG_ENOUGH_ROUND_TRIPS", 0.0)
    with pytest.raises(AssertionError):
        check_open(0.1)


@pytest.mark.parametrize("workers", [2, 4, 5, 33])
def test_half_a_second_is_enough_however_many_there_are(workers):
    _, _, meeting = found_in(read_network("100mbit,20ms", workers))
    assert meeting.now < (0.65 if workers % 2 else 0.5)  # who was left over meets later, and begins with 128 KiB


def test_slow_lines_are_told_by_few_bytes():
    _, _, meeting = found_in(network_of(*[(1, 1)] * 4, path=Path(round_trip_seconds=0.06)))
    assert meeting.now < 0.7


def test_near_ones_meet_and_far_ones_need_not():
    host = {"up_bits_per_second": 2e8, "down_bits_per_second": 2e8}
    network = Network(
        hosts=tuple(Host(site=name, **host) for name in "wewew"),
        default=NEAR,
        paths={frozenset("we"): Path(round_trip_seconds=0.08)},
    )
    up, down, meeting = found_in(network)
    assert up + down == pytest.approx([2e8] * 10, rel=0.06)
    assert all((sender - receiver) % 2 == 0 for sender, receiver in meeting.flows)
    assert meeting.now < 0.65
    alone = replace(network, hosts=tuple(replace(each, site=str(rank)) for rank, each in enumerate(network.hosts[:2])))
    assert found_in(replace(alone, default=Path(round_trip_seconds=0.08)))[0] == pytest.approx([2e8] * 2, rel=0.06)


def test_who_meets_whom_first():
    assert first_pairs([[0, 1, 2, 3]], 0) == [(0, 1), (2, 3)]
    assert first_pairs([[0, 1, 2, 3]], 1) == [(0, 2), (1, 3)]
    assert first_pairs([[0, 1, 2, 3, 4, 5, 6]], 0) == [(0, 1), (2, 3), (4, 5)]
    assert first_pairs([[0, 1, 2, 3, 4, 5, 6]], 1) == [(0, 2), (1, 3), (4, 6)]
    assert first_pairs([[0, 2, 4], [1, 3]], 0) == [(0, 2), (1, 3)]
    assert first_pairs([[0, 2, 4], [1, 3]], 1) == [(0, 4)]
    assert first_pairs([[0, 2], [1], [3], [4]], 0) == [(0, 2), (1, 3)]
    assert first_pairs([[0]], 0) == first_pairs([[0, 1]], 1) == []


def test_whoever_is_not_clear_meets_the_fastest_it_has_not_met():
    seen = {(0, 1): 10.0, (1, 0): 10.0, (2, 3): 100.0, (3, 2): 100.0, (4, 5): 90.0, (5, 4): 90.0}
    assert next_pairs(Rates(6, seen), [[0, 1, 2, 3, 4, 5]]) == [(0, 2), (1, 3)]
    assert next_pairs(Rates(6, seen), [[2, 3], [0, 1, 4, 5]]) == [(0, 4), (1, 5)]
    assert next_pairs(Rates(6, seen | {(1, 4): 80.0, (4, 1): 80.0}), [[0, 1, 2, 3, 4, 5]]) == []
    assert next_pairs(Rates(2, {(0, 1): 10.0, (1, 0): 100.0}), [[0, 1]]) == []


def test_those_who_only_met_unclear_ones_meet_each_other():
    seen = {(0, 1): 100.0, (1, 0): 10.0, (2, 3): 100.0, (3, 2): 10.0}
    assert next_pairs(Rates(4, seen), [[0, 1, 2, 3]]) == [(0, 2), (1, 3)]


def test_rates_that_follow_closely_are_one():
    assert alike([97.0, 101.0, 95.4]) == (97.0,) * 3
    assert alike([96.0, 1004.0, 11.0, 940.0]) == (96.0, 970.0, 11.0, 970.0)
    assert alike([1.0, 1.5, 2.25]) == (1.5,) * 3
    assert alike([123_456_789.0]) == (120_000_000.0,)
    assert alike([]) == ()


def test_of_one_machine_all_have_one():
    assert all_alike([330.0, 2800.0, 1000.0]) == (1000.0,) * 3


def check_everybody_meets(pairs_of, sites):
    """Nobody is left of whom nothing is known, whatever pairs see: a line without a rate is none."""
    world = sum(map(len, sites))
    random = Random(5)
    for _ in range(200):
        seen = Rates(world)
        for meeting in range(2):
            for a, b in first_pairs(sites, meeting):
                seen.seen |= {flow: random.choice((1e6, 2e6, 5e6)) for flow in ((a, b), (b, a))}
        met = {host for flow in seen.seen for host in flow} | {host for pair in pairs_of(seen, sites) for host in pair}
        assert met == set(range(world))


CROWDS = [[[0, 1, 2, 3, 4]], [[0, 4], [1, 2, 3, 5, 6]], [[0], [*range(1, 6)], [*range(6, 15)]]]


@pytest.mark.parametrize("sites", CROWDS, ids=["five", "five and two", "three sites"])
def test_everybody_meets_somebody(sites):
    check_everybody_meets(next_pairs, sites)


def test_whoever_comes_last_though_nobody_has_met_it_is_left_out():
    class AllMet(Rates):
        """In the order of ranks alone."""

        def slowest(self, rank):
            return super().slowest(rank) or 1e-9

    def by_rank(seen, sites):
        return next_pairs(AllMet(seen.world, seen.seen), sites)

    with pytest.raises(AssertionError):
        check_everybody_meets(by_rank, CROWDS[0])


# -- lines that sites share


def two_sites(hosts, host_rate, shared_rate=None, round_trip=0.03, sites="nsns"):
    host = {"up_bits_per_second": host_rate, "down_bits_per_second": host_rate}
    return Network(
        hosts=tuple(Host(site=sites[place % len(sites)], **host) for place in range(hosts)),
        default=Path(round_trip_seconds=0.0002),
        paths={frozenset("ns"): Path(round_trip_seconds=round_trip, bits_per_second=shared_rate)},
    )


def shared_in(network, look=find_shared):
    seconds, meeting = round_trips(network), Meeting(network)
    return look(sites_of(seconds), seconds, meeting), meeting


SHARED = {
    "an office line": (two_sites(4, 1e9, 100e6), 100e6),
    "of eight": (two_sites(8, 1e9, 100e6), 100e6),
    "hardly faster than a host": (two_sites(8, 50e6, 70e6), 70e6),
    "three here, two there": (two_sites(5, 1e9, 100e6), 100e6),
    "far": (two_sites(4, 100e6, 50e6, round_trip=0.15), 50e6),
    "near": (two_sites(4, 1e9, 200e6, round_trip=0.002), 200e6),
    "as fast as all hosts": (two_sites(4, 100e6, 200e6), None),
    "none": (two_sites(4, 100e6), None),
    "none, on fast hosts whose windows do not open in time": (two_sites(4, 10e9, round_trip=0.1), None),
}


def check_shared(case, look=find_shared):
    network, rate = SHARED[case]
    found, _ = shared_in(network, look)
    assert found == (pytest.approx({(0, 1): rate}, rel=0.1) if rate else {})


@pytest.mark.parametrize("case", SHARED)
def test_a_line_that_sites_share_is_seen(case):
    check_shared(case)


def by_one_pair(sites, seconds, meet):
    """What one pair sees is taken for what all share."""
    nbytes = bandwidth_probe._fill([(0, 1)], seconds, meet)
    return {(0, 1): 8 * bandwidth_probe.ETHERNET.wire_bytes(nbytes) / meet([(0, 1)], nbytes)[0, 1]}


@pytest.mark.parametrize("case", ["as fast as all hosts", "none"])
def test_what_a_pair_sees_alone_is_no_shared_line(case):
    with pytest.raises(AssertionError):
        check_shared(case, by_one_pair)


@pytest.mark.parametrize(("hosts", "seconds"), [(4, 1.0), (8, 1.1), (64, 1.5)])
def test_it_takes_about_a_second_however_many_there_are(hosts, seconds):
    assert shared_in(two_sites(hosts, 1e9, 100e6))[1].now < seconds


def test_three_sites_that_share_one_way_each():
    network = Network(
        hosts=tuple(Host(site=site, up_bits_per_second=1e9, down_bits_per_second=1e9) for site in "abcabc"),
        default=Path(round_trip_seconds=0.0002),
        paths={
            frozenset("ab"): Path(round_trip_seconds=0.03, bits_per_second=100e6),
            frozenset("bc"): Path(round_trip_seconds=0.03, bits_per_second=50e6),
            frozenset("ac"): Path(round_trip_seconds=0.03),
        },
    )
    assert shared_in(network)[0] == pytest.approx({(0, 1): 100e6, (1, 2): 50e6}, rel=0.1)


def test_single_hosts_share_nothing_and_one_site_asks_nobody():
    assert shared_in(two_sites(2, 1e9, 100e6, round_trip=0.03))[1].now == 0.0
    assert shared_in(read_network("1gbit,1ms", 4))[1].now == 0.0


def test_a_site_meets_one_other_at_a_time():
    assert site_meetings([2, 2]) == [[(0, 1)]]
    assert site_meetings([2, 1, 2]) == [[(0, 2)]]
    assert site_meetings([2, 2, 2]) == [[(0, 1)], [(0, 2)], [(1, 2)]]
    for meeting in (found := site_meetings([2] * 6)):
        assert len({site for pair in meeting for site in pair}) == 2 * len(meeting)
    assert sorted(pair for meeting in found for pair in meeting) == [(a, b) for a in range(6) for b in range(a + 1, 6)]


# -- relays ------------------------------------------------------------------------------------------------------------


def relayed_rate(relay, home, pairs=((1, 2), (3, 4)), look=find_total):
    """Measured in Mbit/s, of a relay at host 0. relay, home: (up, down) in Mbit/s."""
    network = network_of(relay, *[home] * 4, path=Path(round_trip_seconds=0.03))
    network = replace(network, relayed={frozenset(pair): 0 for pair in combinations(range(1, 5), 2)})
    flows = [flow for a, b in pairs for flow in ((a, b), (b, a))]
    return look(flows, round_trips(network), Meeting(network)) / 1e6


def one_pair(flows, *rest):
    """Mutant: pairs that meet one by one do not fill the relay."""
    return find_total(flows[:2], *rest)


def check_relay(look=find_total):
    assert relayed_rate((100, 100), (40, 100), look=look) == pytest.approx(100, rel=0.06)
    assert relayed_rate((30, 90), (40, 40), look=look) == pytest.approx(30, rel=0.06)


def test_a_relay_is_measured_by_all_of_its_pairs_at_once():
    check_relay()
    with pytest.raises(AssertionError):
        check_relay(one_pair)


def test_a_relay_that_is_faster_than_its_hosts_is_as_fast_as_they_load_it():
    assert relayed_rate((1000, 1000), (20, 100)) == pytest.approx(4 * 20, rel=0.06)


def relay_with_a_limit(look=find_total):
    """Virtual seconds that the measurement takes at a host of fast local workers that sends 5 Mbit/s to a home."""
    network = network_of((5, 1000), (1000, 1000), path=Path(round_trip_seconds=0.03))
    meeting = Meeting(network)
    assert look([(0, 1), (1, 0)], round_trips(network), meeting) >= 10e6 * 0.94
    return meeting.now


def test_later_pairs_may_be_much_slower_than_the_first(monkeypatch):
    """Two workers of an office meet each other, and then each meets a home that is limited to 5 Mbit/s."""
    network = network_of((1000, 1000), (1000, 1000), (5, 5))
    assert found_in(network)[2].now < 3
    monkeypatch.setattr(bandwidth_probe, "LATER_BYTES", 2**22)
    assert found_in(network)[2].now > 6


def test_a_limited_upload_is_measured_within_seconds_beside_a_fast_download(monkeypatch):
    assert relay_with_a_limit() < 4
    monkeypatch.setattr(bandwidth_probe, "TOO_LONG_SECONDS", 1e9)
    assert relay_with_a_limit() > 4


def check_unshared(look=find):
    """The connection of host 1 to the relay is measured while other pairs do not load it."""
    network = network_of((50, 50), *[(200, 200)] * 4, path=Path(round_trip_seconds=0.03))
    network = replace(network, relayed={frozenset(pair): 0 for pair in combinations(range(1, 5), 2)})
    seconds = round_trips(network)
    spokes = [(0, rank) for rank in range(1, 5)]
    lines = lambda a, b: {a, b, 0}  # noqa: E731
    rates = look([list(range(5))], seconds, Meeting(network), lines, spokes)
    assert (rates.up(1), rates.down(1)) == pytest.approx((50e6, 50e6), rel=0.06)


def test_pairs_that_share_a_relay_meet_one_after_the_other():
    check_unshared()
    with pytest.raises(AssertionError):
        check_unshared(lambda sites, seconds, meet, lines, spokes: find(sites, seconds, meet))


def test_pairs_are_distributed_to_few_groups():
    alone = lambda a, b: {a, b}  # noqa: E731
    star = lambda a, b: {a, b, 0}  # noqa: E731
    pairs = [(2 * place + 1, 2 * place + 2) for place in range(20)]
    assert apart(pairs, alone) == [pairs]
    groups = apart(pairs, star)
    assert sorted(map(len, groups)) == [2] * 4 + [3] * 4
    assert sorted(pair for group in groups for pair in group) == pairs


def test_a_host_that_relays_meets_unclear_hosts_last():
    """The download of host 4 is faster than any upload that it has met."""
    network = network_of((100, 100), *[(20, 100)] * 4)
    seconds = round_trips(network)
    found = [find([list(range(5))], seconds, Meeting(network), None, spokes) for spokes in ([], [(0, 3), (0, 4)])]
    assert min(found[0].down(rank) for rank in (3, 4)) == pytest.approx(20e6, rel=0.06)
    assert min(found[1].down(rank) for rank in (3, 4)) == pytest.approx(100e6, rel=0.06)


def seconds_to_measure(lines):
    """Two workers in an office that relays between two homes."""
    network = network_of((1000, 1000), (1000, 1000), (20, 100), (20, 100))
    meeting = Meeting(replace(network, relayed={frozenset((2, 3)): 0}))
    rates = find([[0, 1, 2, 3]], round_trips(network), meeting, lines)
    assert rates.up(2) == pytest.approx(20e6, rel=0.15)
    return meeting.now


def test_slow_pairs_begin_with_small_messages_after_fast_ones_if_pairs_are_relayed():
    """The pair of the office needs 4 MB to be measured, which take 3 s from a home."""
    assert seconds_to_measure(lambda a, b: {a, b} if {a, b} != {2, 3} else {0, 2, 3}) < 2.0

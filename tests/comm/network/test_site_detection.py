import pytest

from gossamer.comm.network import Path
from gossamer.comm.network.cost.cheapest_collective import order_of, ranks_per_site
from gossamer.comm.network.site_detection import measured, sites_of

NEAR, FAR = 0.0002, 0.08


def network_of(rows, rate):
    return measured(rows, [rate] * len(rows), [rate] * len(rows))


def matrix(sites, near=NEAR, far=FAR):
    """Round trips between hosts at named sites."""
    return [
        [0.0 if a == b else near if one == other else far for b, other in enumerate(sites)]
        for a, one in enumerate(sites)
    ]


def check_sites(found, names):
    """Hosts share a site where their names are the same, and see the round trips that were measured."""
    for a, one in enumerate(names):
        for b, other in enumerate(names):
            assert (found.hosts[a].site == found.hosts[b].site) == (one == other)
            if a != b:
                assert found.path(a, b) == Path(round_trip_seconds=NEAR if one == other else FAR)


@pytest.mark.parametrize("names", ["we", "ww", "wwee", "wewe", "wwe", "weeee", "wweewwee", "wweexx"])
def test_hosts_near_each_other_are_a_site(names):
    found = network_of(matrix(names), 1e9)
    if len(names) == 2:  # one round trip only: there is nothing it would be longer than
        assert found.is_uniform
        return
    check_sites(found, names)
    wrong = names[:-1] + "?" if names.count(names[-1]) > 1 else names[:-1] + names[0]
    with pytest.raises(AssertionError):
        check_sites(found, wrong)


def test_sites_are_numbered_by_their_first_host():
    assert [host.site for host in network_of(matrix("ewew"), 1e9).hosts] == ["site 0", "site 1", "site 0", "site 1"]


def test_lines_have_the_rate_that_was_measured():
    (host, *_) = network_of(matrix("ww"), 123e6).hosts
    assert host.up_bits_per_second == host.down_bits_per_second == 123e6


def test_sites_are_more_than_four_times_as_far_as_neighbours():
    assert network_of(matrix("wwee", 0.01, 0.039), 1e9).is_uniform
    assert not network_of(matrix("wwee", 0.01, 0.041), 1e9).is_uniform


def test_round_trips_within_a_machine_tell_no_sites():
    assert network_of(matrix("wwee", 0.00001, 0.00009), 1e9).is_uniform
    assert network_of(matrix("wwee", 0.0, 0.00039), 1e9).is_uniform
    assert not network_of(matrix("wwee", 0.0, 0.0005), 1e9).is_uniform


def test_alike_hosts_have_one_path_the_median():
    found = network_of([[0, 0.010, 0.012], [0.010, 0, 0.020], [0.012, 0.020, 0]], 1e9)
    assert found.default == Path(round_trip_seconds=0.012)
    assert found.is_uniform


def test_the_shorter_of_both_directions_counts():
    assert network_of([[0, 0.5], [0.01, 0]], 1e9).default.round_trip_seconds == 0.01


def test_the_largest_gap_divides_racks_in_a_town_are_one_site():
    rack, town, ocean = 0.0002, 0.001, 0.08
    rows = [[0, rack, town, ocean], [rack, 0, town, ocean], [town, town, 0, ocean], [ocean, ocean, ocean, 0]]
    found = network_of(rows, 1e9)
    assert [host.site for host in found.hosts] == ["site 0"] * 3 + ["site 1"]
    assert found.path(0, 2) == found.path(0, 1) == Path(round_trip_seconds=town)


def test_one_host_has_nobody_to_be_far_from():
    assert network_of([[0.0]], 1e9).is_uniform


@pytest.mark.parametrize("rows", [[], [[0.0, 1.0]], [[0.0, 1.0], [1.0]]])
def test_a_matrix_is_square(rows):
    with pytest.raises(ValueError, match="square matrix"):
        network_of(rows, 1e9)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_round_trips_are_seconds(bad):
    with pytest.raises(ValueError, match=r"invalid between \[\(0, 1\)\]"):
        network_of([[0, bad], [1.0, 0]], 1e9)


def test_choices_are_made_from_measurements():
    assert ranks_per_site(network_of(matrix("wwee"), 1e9)) == 2
    assert order_of(network_of(matrix("wewe"), 1e9)) == (0, 2, 1, 3)


def check_lines(found):
    """Every host has its own lines, and every path its share of loss."""
    assert [host.up_bits_per_second for host in found.hosts] == [1e6, 2e6, 3e6, 4e6]
    assert [host.down_bits_per_second for host in found.hosts] == [5e6, 6e6, 7e6, 8e6]
    assert found.path(0, 1) == Path(round_trip_seconds=NEAR)
    assert found.path(0, 3) == Path(round_trip_seconds=FAR, loss=0.01)


UP, DOWN = (1e6, 2e6, 3e6, 4e6), (5e6, 6e6, 7e6, 8e6)
LOST = [[0.01 * (one != other) for other in "wwee"] for one in "wwee"]


def test_hosts_have_lines_of_their_own_and_paths_their_loss():
    check_lines(measured(matrix("wwee"), UP, DOWN, LOST))


@pytest.mark.parametrize("broken", [(DOWN, UP, LOST), (UP, DOWN, None), (UP[::-1], DOWN, LOST)])
def test_other_lines_are_noticed(broken):
    with pytest.raises(AssertionError):
        check_lines(measured(matrix("wwee"), *broken))


def test_sites_are_hosts_by_number():
    assert sites_of(matrix("wewe")) == [[0, 2], [1, 3]]
    assert sites_of(matrix("www")) == [[0, 1, 2]]

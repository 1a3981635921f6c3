from dataclasses import dataclass, replace

import pytest

from gossamer.comm.network import read_network
from gossamer.comm.network.model import Host, Network, Path
from gossamer.plan.advise.prices import Prediction
from gossamer.plan.advise.thresholds import (
    longest_round_trip_seconds,
    ranges,
    slowest_bits_per_second,
    thresholds,
    with_rate,
    with_round_trip,
)


@dataclass
class Planted:
    """Seconds of a step: fixed ones, bits over the slowest line, and round trips."""

    costs: dict  # by strategy or compressor: (seconds, bits, round trips)
    workers: int = 4

    def seconds(self, recipe, network):
        name = next(name for name in self.costs if name.split("(")[0] in repr(recipe))
        seconds, bits, trips = self.costs[name]
        seconds += bits / slowest_bits_per_second(network) + trips * longest_round_trip_seconds(network)
        return seconds


FINALISTS = [
    Prediction(recipe="Dense()", step_seconds=1.0),
    Prediction(recipe="Int8()", step_seconds=1.0),
    Prediction(recipe="DiLoCo(period=20)", step_seconds=1.0, strategy_passes=2.0),
]


def found(of, pricer, network="100mbit,20ms", **changes):
    told = thresholds(FINALISTS, pricer, read_network(network, 4), **changes)
    return [(each.recipe, each.above, each.below) for each in told if each.of == of]


def test_rates_change_the_order_where_costs_are_equal():
    """Int8: 1.1 + 1e8 / rate, Dense: 1 + 4e8 / rate, equal at 3e9; DiLoCo: 2 (1 + 1e6 / rate), at 1.09e8."""
    pricer = Planted({"Int8": (1.1, 1e8, 0.0), "DiLoCo": (1.0, 1e6, 0.0), "Dense": (1.0, 4e8, 0.0)})
    (low, mid, high) = found("rate", pricer)
    assert [each[0] for each in (low, mid, high)] == ["DiLoCo(period=20)", "Int8()", "Dense()"]
    assert low[1] == 0.0
    assert high[2] is None
    assert (low[2], mid[2]) == (mid[1], high[1])
    assert mid[1] == pytest.approx((1e8 - 2e6) / 0.9, rel=0.1)
    assert mid[2] == pytest.approx(3e9, rel=0.1)


def test_round_trips_change_the_order_too():
    pricer = Planted({"Int8": (1.0, 0.0, 3.0), "DiLoCo": (0.9, 0.0, 0.1), "Dense": (1.05, 0.0, 1.0)})
    trips = found("round trip", pricer)
    assert [each[0] for each in trips] == ["Int8()", "Dense()", "DiLoCo(period=20)"]
    assert trips[0][2] == pytest.approx(0.025, rel=0.1)
    assert trips[1][2] == pytest.approx(0.75 / 0.8, rel=0.1)
    assert found("rate", pricer) == [("Int8()", 0.0, None)]


def test_what_a_race_has_found_counts_more_than_the_prior():
    pricer = Planted({"Int8": (1.1, 1e8, 0.0), "DiLoCo": (1.0, 1e6, 0.0), "Dense": (1.0, 4e8, 0.0)})
    raced = found("rate", pricer, expected_steps=[1.0, 1.0, 1.0])
    assert [each[0] for each in raced] == ["DiLoCo(period=20)"]
    assert [each[0] for each in found("rate", pricer)] != [each[0] for each in raced]


def test_one_that_is_always_first_has_no_threshold():
    assert ranges([1.0, 10.0, 100.0], lambda value: "a") == [("a", 0.0, None)]


def test_a_bisection_that_stops_at_once_would_be_wrong_by_a_factor():
    edge = 12.42  # next to the lower of the last two prices
    ((_, _, below), _) = ranges([1.0, 10.0, 100.0], lambda value: "a" if value < edge else "b")
    assert below == pytest.approx(edge, rel=0.05)
    assert abs((10.0 * 100.0) ** 0.5 / edge - 1) > 0.5  # a twin that takes the middle of two prices


SITES = Network(
    hosts=(
        Host(up_bits_per_second=1e9, down_bits_per_second=2e9, site="a"),
        Host(up_bits_per_second=4e8, down_bits_per_second=1e9, site="b"),
    ),
    default=Path(round_trip_seconds=0.001),
    paths={frozenset(("a", "b")): Path(round_trip_seconds=0.08, bits_per_second=1e8, loss=0.01)},
)


def test_networks_keep_their_shape():
    slower = with_rate(SITES, 1e7)
    assert slowest_bits_per_second(SITES) == 1e8
    assert slowest_bits_per_second(slower) == pytest.approx(1e7)
    assert [host.up_bits_per_second for host in slower.hosts] == pytest.approx([1e8, 4e7])
    assert slower.path(0, 1).loss == 0.01
    assert slower.path(0, 1).round_trip_seconds == 0.08
    nearer = with_round_trip(SITES, 0.008)
    assert longest_round_trip_seconds(nearer) == pytest.approx(0.008)
    assert nearer.default.round_trip_seconds == pytest.approx(0.0001)
    assert nearer.hosts == SITES.hosts


def test_networks_with_relays_keep_their_shape():
    """The relay of hosts 0 and 1 is the slowest machine, and their path has two legs."""
    slow, fast = (Host(up_bits_per_second=each, down_bits_per_second=each, site="a") for each in (1e7, 1e9))
    path = Path(round_trip_seconds=0.02)
    relayed = Network(hosts=(fast, fast), relays=(slow,), default=path, relayed={frozenset((0, 1)): 2})
    faster = with_rate(relayed, 1e8)
    assert slowest_bits_per_second(relayed) == 1e7
    assert faster.bits_per_second(0, 1) == slowest_bits_per_second(faster) == pytest.approx(1e8)
    assert longest_round_trip_seconds(relayed) == pytest.approx(0.04)
    assert with_round_trip(relayed, 0.4).path(0, 1).round_trip_seconds == pytest.approx(0.4)


def test_a_network_without_round_trips_is_given_them():
    assert longest_round_trip_seconds(with_round_trip(replace(SITES, default=Path(), paths={}), 0.05)) == 0.05

from __future__ import annotations

from math import sqrt
from random import Random

import pytest

from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation.faulty_network import Cut, Fault, Kill, Link, Pause, Restart, VirtualNetwork

A, B, C = Peer("worker", 0), Peer("worker", 1), Peer("server", 0)
EVERYONE = (A, B, C)


def test_a_message_takes_half_a_round_trip_and_its_bits() -> None:
    link = Link(round_trip_seconds=0.5, bits_per_second=64)
    assert link.delivery_delays(16, 1.0, Random(0)) == (2.25,)
    assert link.delivery_delays(0, 1.0, Random(0)) == (0.25,)
    assert Link().delivery_delays(10**9, 1.0, Random(0)) == (0.0,)
    assert Link(loss=0.999999).delivery_delays(1, 1.0, Random(0)) == ()
    first, again = Link(round_trip_seconds=2, duplicate=1).delivery_delays(1, 3.0, Random(0))
    assert first == 1.0
    assert 1.0 < again < 4.0


def check_shares(loss: float, duplicate: float) -> None:
    """4.5 standard deviations around the shares that were asked for."""
    random, count = Random(5), 4000
    fates = [len(Link(loss=loss, duplicate=duplicate).delivery_delays(1, 1.0, random)) for _ in range(count)]
    for share, found in ((0.25, fates.count(0)), (0.75 * 0.1, fates.count(2))):
        assert abs(found - share * count) < 4.5 * sqrt(share * (1 - share) * count)


def test_shares_of_what_is_lost_and_doubled() -> None:
    check_shares(0.25, 0.1)


@pytest.mark.parametrize(("loss", "duplicate"), [(0.3, 0.1), (0.25, 0.05), (0.0, 0.0)])
def test_other_shares_are_noticed(loss: float, duplicate: float) -> None:
    with pytest.raises(AssertionError):
        check_shares(loss, duplicate)


def test_jitter_is_its_mean_and_lets_messages_overtake_each_other() -> None:
    random, link = Random(3), Link(round_trip_seconds=2, jitter_seconds=0.5)
    seconds = [link.delivery_delays(1, 1.0, random)[0] for _ in range(4000)]
    assert min(seconds) >= 1
    assert abs(sum(seconds) / 4000 - 1.5) < 4.5 * 0.5 / sqrt(4000)
    assert seconds != sorted(seconds)


class Written:
    """A target that writes down what happens to it."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *what: self.lines.append((name, *what))


@pytest.mark.parametrize(
    ("fault", "table"),
    [
        (Kill(A, 1.5), [(1.5, "kill", A)]),
        (Restart(A, 2), [(2, "restart", A)]),
        (Pause(B, at=1, seconds=2.5), [(1, "pause", B, 3.5), (3.5, "resume", B)]),
        (Cut((A,), (B, C), 1), [(1, "cut", ((A, B), (A, C), (B, A), (C, A)))]),
        (Cut((A,), (B,), 1, 2, one_way=True), [(1, "cut", ((A, B),)), (2, "heal", ((A, B),))]),
        (Cut((A,), EVERYONE, 1, one_way=True), [(1, "cut", ((A, B), (A, C)))]),
    ],
)
def test_faults_as_tables(fault: Fault, table: list[tuple[object, ...]]) -> None:
    written, moments = Written(), []
    for moment, callback in fault.effects():
        callback(written)  # type: ignore[arg-type]
        moments.append(moment)
    assert [(moment, *line) for moment, line in zip(moments, written.lines, strict=True)] == table


def test_links_of_pairs_count_both_ways_unless_both_are_given() -> None:
    up, down, near = Link(bits_per_second=1e6), Link(bits_per_second=1e8), Link(round_trip_seconds=1e-4)
    net = VirtualNetwork(round_trip_seconds=0.08, loss=0.1, links={(A, C): up, (C, A): down, (A, B): near})
    assert (net.link(A, C), net.link(C, A)) == (up, down)
    assert net.link(A, B) == net.link(B, A) == near
    assert net.link(B, C) == Link(round_trip_seconds=0.08, loss=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"round_trip_seconds": -1}, "round_trip_seconds must be"),
        ({"bits_per_second": 0}, "bits_per_second must be positive"),
        ({"jitter_seconds": -0.1}, "jitter"),
        ({"loss": 1.0}, "use Cut"),
        ({"duplicate": 1.1}, "duplicate"),
        ({"dead_after_seconds": 0}, "dead_after_seconds"),
        ({"resend_seconds": 0}, "resend_seconds"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualNetwork(**wrong)  # type: ignore[arg-type]


def test_bad_networks_are_the_same_for_the_same_seed_and_over_by_the_horizon() -> None:
    nets = [VirtualNetwork.random(seed, EVERYONE, 10.0, mortal=(A,)) for seed in range(200)]
    assert nets == [VirtualNetwork.random(seed, EVERYONE, 10.0, mortal=(A,)) for seed in range(200)]
    assert len({repr(net) for net in nets}) == 200
    moments = [moment for net in nets for fault in net.faults for moment, _ in fault.effects()]
    assert 0 < min(moments) < max(moments) <= 10
    for net in nets:
        killed = [fault.peer for fault in net.faults if isinstance(fault, Kill)]
        assert killed == [fault.peer for fault in net.faults if isinstance(fault, Restart)]
        assert set(killed) <= {A}
    kinds = {type(fault) for net in nets for fault in net.faults}
    assert kinds == {Kill, Restart, Cut, Pause}


def test_what_a_bad_network_is_told_is_not_drawn() -> None:
    net = VirtualNetwork.random(1, EVERYONE, 10.0, loss=0.0, faults=(Kill(B, 1),))
    assert (net.loss, net.faults) == (0.0, (Kill(B, 1),))
    assert VirtualNetwork.random(1, EVERYONE, 10.0, bits_per_second=8.0).bits_per_second == 8.0

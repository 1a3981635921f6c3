"""Networks that change."""

from __future__ import annotations

import pytest

from gossamer.comm.network.parse import NetworkError
from gossamer.plan.simulate import NetworkSchedule


def test_a_network_is_in_force_from_its_moment_on() -> None:
    schedule = NetworkSchedule.read("100mbit,20ms; 10mbit,20ms at 30s; 1gbit at 2min", 3)
    rates = [schedule.at(second).hosts[0].up_bits_per_second for second in (0, 29.9, 30, 119, 120, 1e9)]
    assert rates == [1e8, 1e8, 1e7, 1e7, 1e9, 1e9]
    assert {len(network.hosts) for _, network in schedule.changes} == {3}
    assert schedule.at(0).default.round_trip_seconds == 0.02


def test_one_network_is_a_schedule() -> None:
    assert [since for since, _ in NetworkSchedule.read("100mbit", 2).changes] == [0.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a rate"),
        ("100mbit at 0s", "is not"),
        ("100mbit; 10mbit", "'10mbit' does not say when it begins"),
        ("100mbit; 10mbit at noon", "does not say when it begins"),
        ("100mbit; 10mbit at 3 parsecs", "does not say when it begins"),
        ("100mbit; at 3s", "does not say when it begins"),
        ("100mbit; 10 at 3s", "'10' is not a rate"),
        ("100mbit; 10mbit at 9s; 1gbit at 3s", "change at 9 s, 3 s, and each is to come after"),
        ("100mbit; 10mbit at 0s", "each is to come after"),
        ("100mbit,20ms,lost=3", "lost is not part of a network"),
        ("100mbit;", "'' does not say when"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_words(text: str, reason: str) -> None:
    with pytest.raises(NetworkError, match=reason):
        NetworkSchedule.read(text, 2)


def test_an_empty_schedule_is_none() -> None:
    with pytest.raises(NetworkError, match="begins with the network of the first second"):
        NetworkSchedule(())

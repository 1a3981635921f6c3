"""Profile draws: medians and spreads as asked, and device k the same however many are drawn."""

from __future__ import annotations

from math import inf, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest

from gossamer.federated.population import DeviceProfile, drawn_profiles
from gossamer.federated.population.profiles import presence

COUNT = 3000
DRAWN = drawn_profiles(COUNT, seed=1)


def z(values: list[float], mean: float, sigma: float) -> float:
    return (fmean(values) - mean) / (sigma / sqrt(len(values)))


def test_speeds_and_links_are_lognormal_around_their_medians() -> None:
    steps = [log(each.seconds_per_step) for each in DRAWN]
    ups = [log(each.up_bits_per_second) for each in DRAWN]
    assert abs(z(steps, log(0.16), 0.6)) < 4.5
    assert abs(z(ups, log(5e6), 0.8)) < 4.5
    assert abs(z(steps, log(0.16) + 0.6**2 / 2, 0.6)) > 4.5  # the twin: the mean taken for the median
    assert abs(stdev(steps) / 0.6 - 1) < 4.5 / sqrt(2 * COUNT)
    assert all(each.down_bits_per_second == pytest.approx(4 * each.up_bits_per_second) for each in DRAWN)


def is_present(profile: DeviceProfile, moment: float) -> bool:
    return presence(profile, moment)[0] == pytest.approx(moment, rel=0, abs=1e-5)


def test_most_are_there_at_night() -> None:
    there = {hour: sum(is_present(each, 3600.0 * hour) for each in DRAWN) / COUNT for hour in (2, 14)}
    assert there[2] > 4 * there[14]


def test_a_device_is_the_same_however_many_are_drawn() -> None:
    assert drawn_profiles(10, seed=1) == DRAWN[:10]
    assert drawn_profiles(10, seed=2) != DRAWN[:10]


def test_links_do_not_change_with_other_settings() -> None:
    without = drawn_profiles(5, 1, compute_sigma=0.0, present_seconds=86_400)
    assert [each.up_bits_per_second for each in without] == [each.up_bits_per_second for each in DRAWN[:5]]
    assert {each.seconds_per_step for each in without} == {0.16}
    assert all(each.is_always_present for each in without)


def test_instant_networks_are_possible() -> None:
    assert drawn_profiles(1, up_bits_per_second=inf)[0].up_bits_per_second == inf


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"count": 0}, "count is 1 or more"),
        ({"seconds_per_sample": -1.0}, "seconds_per_sample"),
        ({"samples_per_step": 0}, "samples_per_step"),
        ({"up_bits_per_second": 0.0}, "rates are above 0"),
        ({"link_sigma": -0.1}, "link_sigma is a spread"),
        ({"present_seconds": 0.0}, "present_seconds"),
        ({"failure": 1.0}, "failure is a probability"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        drawn_profiles(**({"count": 1} | options))


def test_presence_goes_past_midnight() -> None:
    night = DeviceProfile(present_from=22 * 3600, present_seconds=8 * 3600)
    assert [is_present(night, 3600.0 * hour) for hour in (21.9, 22, 24, 29.9, 30)] == [False, True, True, True, False]
    assert presence(night, 12 * 3600.0)[0] == 22 * 3600
    assert presence(night, 23 * 3600.0)[0] == 23 * 3600
    assert presence(night, 30 * 3600.0)[0] == 46 * 3600


def test_the_next_presence_is_one() -> None:
    """Also where the moment is rounded."""
    for number, each in enumerate(DRAWN[:300]):
        moment = presence(each, 1234567.89 * (number + 1))[0]
        assert is_present(each, moment)
        assert moment >= 1234567.89 * (number + 1)


def test_seconds_of_a_message_and_of_steps() -> None:
    phone = DeviceProfile(
        seconds_per_step=0.5, up_bits_per_second=1e6, down_bits_per_second=8e6, round_trip_seconds=0.1
    )
    assert phone.up_seconds(125_000) == pytest.approx(1.05)
    assert phone.down_seconds(125_000) == pytest.approx(0.175)
    assert phone.training_seconds(3) == 1.5

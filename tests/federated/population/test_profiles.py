"""Device profiles: hours, links, draws, files, and the times of tasks."""

from __future__ import annotations

from collections import Counter
from math import inf, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from gossamer.errors import GossamerError
from gossamer.federated.population import DeviceProfile, DeviceProfileError, drawn_profiles, read_profiles
from gossamer.federated.population.profiles import DAY_SECONDS as DAY
from gossamer.federated.population.profiles import VirtualDevice, presence

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
    assert abs(stdev(ups) / 0.8 - 1) < 4.5 / sqrt(2 * COUNT)
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
        ({"count": 0}, "count must be 1 or more"),
        ({"seconds_per_sample": -1.0}, "seconds_per_sample"),
        ({"samples_per_step": 0}, "samples_per_step"),
        ({"up_bits_per_second": 0.0}, "rates must be above 0"),
        ({"link_sigma": -0.1}, "link_sigma must be 0 or more"),
        ({"present_seconds": 0.0}, "present_seconds"),
        ({"failure": 1.0}, "failure must be a probability"),
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


PHONES = """
[default]
round_trip = "60ms"
failure = "2%"

[[devices]]
share = 0.75
step = "160ms"
up = "1mbit"
down = "10mbit"
present_from = "22:30"
present = "8h"

[[devices]]
share = 0.25
rate = "1gbit"
failure = 0.0
"""
PHONE = DeviceProfile(
    seconds_per_step=0.16,
    up_bits_per_second=1e6,
    down_bits_per_second=1e7,
    round_trip_seconds=0.06,
    present_from=22.5 * 3600,
    present_seconds=8 * 3600,
    failure=0.02,
)
BOX = DeviceProfile(up_bits_per_second=1e9, down_bits_per_second=1e9, round_trip_seconds=0.06)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("count", "phones"), [(1, 1), (2, 2), (3, 2), (4, 3), (10_000, 7500)])
def test_sorts_have_their_shares_of_however_many(tmp_path: Path, count: int, phones: int) -> None:
    found = read_profiles(written(tmp_path, PHONES), count)
    assert Counter(found)[PHONE] == phones
    assert found == [PHONE] * phones + [BOX] * (count - phones)


def test_counts_give_the_first_devices(tmp_path: Path) -> None:
    path = written(tmp_path, '[[devices]]\ncount = 2\nup = "1mbit"\n[[devices]]\nup = "2mbit"')
    assert [each.up_bits_per_second for each in read_profiles(path, 3)] == [1e6, 1e6, 2e6]
    assert len(read_profiles(path, 1)) == 1
    with pytest.raises(DeviceProfileError, match="has 3 devices, but 5 are needed"):
        read_profiles(path, 5)


@pytest.mark.parametrize("lines", ['rate = "1gbit"\nup = "1mbit"', 'up = "1mbit"\nrate = "1gbit"'])
def test_a_rate_of_one_direction_replaces_the_rate_of_both_in_any_order(tmp_path: Path, lines: str) -> None:
    (found,) = read_profiles(written(tmp_path, f"[[devices]]\n{lines}"), 1)
    assert (found.up_bits_per_second, found.down_bits_per_second) == (1e6, 1e9)


def test_one_sort_is_everybody(tmp_path: Path) -> None:
    assert read_profiles(written(tmp_path, "[[devices]]"), 7) == [DeviceProfile()] * 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"has no \[\[devices\]\]"),
        ("[devices]\n", "two brackets"),
        ("default = 3\n[[devices]]", "headings"),
        ("[[phones]]", "has phones"),
        ("[[devices]", "cannot be read"),
        ("[[devices]]\nspeed = 3", "number 1 has 'speed'; devices have step, rate"),
        ('[[devices]]\nup = "fast"', "up: 'fast' is not a rate. Write a number and one of bit"),
        ("[[devices]]\nup = 5", "up: 5 is not a rate"),
        ('[[devices]]\nup = "0mbit"', "number 1: rates must be above 0"),
        ('[[devices]]\nstep = "-1ms"', "step: '-1ms'"),
        ('[[devices]]\npresent = "25h"', "present_seconds at most one"),
        ('[[devices]]\npresent_from = "24:00"', "present_from: '24:00' is not an hour"),
        ("[[devices]]\npresent_from = 22", "present_from: 22"),
        ('[[devices]]\nfailure = "100%"', "failure must be a probability"),
        ('[[devices]]\nfailure = "often"', "failure: 'often'"),
        ("[[devices]]\nfailure = nan", "failure: nan"),
        ("[[devices]]\nfailure = true", "failure: True"),
        ("[[devices]]\nshare = 0.5", "add up to 0.5"),
        ("[[devices]]\nshare = 0.5\n[[devices]]", "share of some devices"),
        ("[[devices]]\nshare = 0.5\n[[devices]]\ncount = 2", "one of both"),
        ('[[devices]]\nshare = "half"', "number 1: share must be above 0.*'half'"),
        ("[[devices]]\ncount = 0", "count must be 1 to"),
        ("[[devices]]\ncount = true", "count must be 1 to"),
        ("[[devices]]\n" + "a." * 100 + "a = 1", "too many dots"),
        ("[[devices]]\na = " + "[" * 5000 + "]" * 5000, "too many dots or brackets"),
        ("[[devices]]\n#" + "x" * 2**20, "more than"),
    ],
)
def test_an_unreadable_text_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(DeviceProfileError, match=told):
        read_profiles(written(tmp_path, text), 2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="cannot be read as device profiles"):
        read_profiles(tmp_path / "none.toml", 2)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceProfileError, match="cannot be read"):
        read_profiles(tmp_path / "binary.toml", 2)


SLOW = DeviceProfile(seconds_per_step=2.0, up_bits_per_second=80.0, down_bits_per_second=800.0, round_trip_seconds=0.5)


def test_a_task_takes_its_way_its_steps_and_its_way_back() -> None:
    times = VirtualDevice(0, SLOW).take(10.0, down_bytes=100, steps=3, up_bytes=20)
    assert times.began == pytest.approx(10 + 0.25 + 1)
    assert times.arrived == pytest.approx(times.began + 6 + 2 + 0.25)


def test_tasks_wait_for_each_other() -> None:
    device = VirtualDevice(0, SLOW)
    first = device.take(0.0, 0, 5, 0)
    second = device.take(0.0, 0, 1, 0)
    assert second.began == pytest.approx(first.began + 10)


@pytest.mark.parametrize(
    ("begins", "lasts", "moment", "there"),
    [
        (0, DAY, 5, 5),
        (100, 50, 0, 100),
        (100, 50, 120, 120),
        (100, 50, 150, 100 + DAY),
        (DAY - 10, 20, 5, 5),
    ],
)
def test_a_device_that_is_absent_begins_when_it_is_back(
    begins: float, lasts: float, moment: float, there: float
) -> None:
    assert presence(DeviceProfile(present_from=begins, present_seconds=lasts), moment)[0] == there


def test_failures_are_drawn_as_often_as_said_and_alike_for_a_seed() -> None:
    def draws(seed: int) -> list[bool]:
        device = VirtualDevice(3, DeviceProfile(failure=0.25), seed)
        return [device.fails_next() for _ in range(2000)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    z = (sum(draws(1)) - 500) / (2000 * 0.25 * 0.75) ** 0.5
    assert abs(z) < 4
    assert not VirtualDevice(3, DeviceProfile()).fails_next()

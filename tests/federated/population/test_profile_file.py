"""Profile file: sorts of devices by count or by share, and errors that name the line to write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.federated.population import DeviceProfile, DeviceProfileError, read_profiles

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
    with pytest.raises(DeviceProfileError, match="has 3 devices and 5 take part"):
        read_profiles(path, 5)


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
        ('[[devices]]\nup = "fast"', "up is 'fast': write a number and one of bit"),
        ("[[devices]]\nup = 5", 'up is 5: write.*"1mbit"'),
        ('[[devices]]\nup = "0mbit"', "number 1: rates are above 0"),
        ('[[devices]]\nstep = "-1ms"', "step is '-1ms'"),
        ('[[devices]]\npresent = "25h"', "present_seconds is at most one"),
        ('[[devices]]\npresent_from = "24:00"', "present_from is '24:00': write an hour"),
        ("[[devices]]\npresent_from = 22", "present_from is 22"),
        ('[[devices]]\nfailure = "100%"', "failure is a probability"),
        ('[[devices]]\nfailure = "often"', "failure is 'often'"),
        ("[[devices]]\nfailure = nan", "failure is nan"),
        ("[[devices]]\nfailure = true", "failure is True"),
        ("[[devices]]\nshare = 0.5", "add up to 0.5"),
        ("[[devices]]\nshare = 0.5\n[[devices]]", "share of some devices"),
        ("[[devices]]\nshare = 0.5\n[[devices]]\ncount = 2", "one of both"),
        ('[[devices]]\nshare = "half"', "number 1: share is above 0.*'half'"),
        ("[[devices]]\ncount = 0", "count is how many"),
        ("[[devices]]\ncount = true", "count is how many"),
        ("[[devices]]\n" + "a." * 100 + "a = 1", "too many dots"),
        ("[[devices]]\na = " + "[" * 5000 + "]" * 5000, "too many dots or brackets"),
        ("[[devices]]\n#" + "x" * 2**20, "more than"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(DeviceProfileError, match=told):
        read_profiles(written(tmp_path, text), 2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="cannot be read as device profiles"):
        read_profiles(tmp_path / "none.toml", 2)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceProfileError, match="cannot be read"):
        read_profiles(tmp_path / "binary.toml", 2)

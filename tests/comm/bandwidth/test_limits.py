"""Limits as users write them: rates, hours across midnight, and caps."""

from __future__ import annotations

import pytest

from gossamer.comm.bandwidth.limits import LimitError, MachineLimits, RateSchedule, read_cap

NIGHT = "5mbit; none at 22:00-06:00; 1mbit at 12:00-13:30"


def minute(text):
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


@pytest.mark.parametrize(
    ("moment", "rate"),
    [
        ("21:59", 5e6),
        ("22:00", None),
        ("23:59", None),
        ("00:00", None),
        ("05:59", None),
        ("06:00", 5e6),
        ("12:00", 1e6),
        ("13:29", 1e6),
        ("13:30", 5e6),
    ],
)
def test_hours_begin_and_end_at_their_minute_also_across_midnight(moment, rate):
    assert RateSchedule.read(NIGHT).at(minute(moment)) == rate


def test_equal_hours_are_the_whole_day():
    assert {RateSchedule.read("none; 2mbit at 08:00-8:00").at(each) for each in range(1440)} == {2e6}
    assert {RateSchedule.read("none; 2mbit at 00:00-24:00").at(each) for each in range(1440)} == {2e6}


def test_of_overlapping_hours_the_last_counts():
    schedule = RateSchedule.read("none; 2mbit at 08:00-20:00; 1mbit at 10:00-11:00")
    assert schedule.at(minute("10:30")) == 1e6
    assert schedule.at(minute("11:30")) == 2e6


@pytest.mark.parametrize("text", ["0mbit", "0.0mbit", "1kbit", "63kbit", "5mbit; 0kbit at 22:00-06:00"])
def test_a_limit_of_zero_is_refused_in_one_line_with_the_line_to_write(text):
    with pytest.raises(LimitError, match="Write 5mbit, or `none`") as refused:
        RateSchedule.read(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "5", "-5mbit", "nan mbit", "5mbit;", "5mbit; none", "5mbit; none at 22-06", "5mbit; none at 25:00-06:00"]
    + ["5mbit; none at 22:60-06:00", "5mbit; at 22:00-06:00", "5mbit 22:00-06:00", "5mbit; none at 24:01-06:00"],
)
def test_an_invalid_limit_is_refused(text):
    with pytest.raises(LimitError, match="Write"):
        RateSchedule.read(text)


@pytest.mark.parametrize(("text", "nbytes"), [("10GB", 10**10), ("1.5 tb", 1_500_000_000_000), ("none", None)])
def test_caps_have_decimal_units(text, nbytes):
    assert read_cap(text) == nbytes


@pytest.mark.parametrize("text", ["0GB", "999kB", "10", "10gbit", "-1GB", ""])
def test_an_invalid_cap_is_refused(text):
    with pytest.raises(LimitError, match=r"10GB"):
        read_cap(text)


def test_limits_are_read_from_their_own_texts():
    limits = MachineLimits().changed({"upload": NIGHT, "daily_cap": "10GB", "download": None})
    assert MachineLimits().changed(limits.texts()) == limits
    assert limits.changed({"download": "20mbit"}).upload == limits.upload
    assert str(limits) == f"upload {NIGHT}, download none, 10.0 GB per day"

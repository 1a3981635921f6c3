from __future__ import annotations

import pytest

from gossamer.base.units import (
    bytes_text,
    count_text,
    first_line,
    parse_rate,
    parse_seconds,
    ranks_text,
    rate_text,
    seconds_text,
    share_text,
    short,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.0 kB"), (1_200_000, "1.2 MB"), (40_123, "40.1 kB"), (999_960, "1.0 MB"),
     (123_456_789, "123 MB"), (2e18, "2000 PB")],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.034, "34 ms"), (0.0214, "21.4 ms"), (3e-7, "0.3 µs"), (1.25, "1.25 s"), (99.4, "99.4 s"),
     (100, "1 min 40 s"), (200.4, "3 min 20 s"), (3599.9, "1 h 0 min"), (7500, "2 h 5 min")],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.2, "1.20"), (0.01234, "0.0123"), (12.34, "12.3"), (123.4, "123"), (1e-7, "1.00e-07"), (float("nan"), "nan")],
)  # fmt: skip
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_rates() -> None:
    assert [rate_text(rate) for rate in (0, 999, 12.34e6, 1.5e9)] == [
        "0 bit/s",
        "999 bit/s",
        "12.3 Mbit/s",
        "1.5 Gbit/s",
    ]


def test_shares_and_counts() -> None:
    assert [share_text(share) for share in (0, 0.004, 0.2, 1)] == ["0 %", "0.4 %", "20 %", "100 %"]
    assert [count_text(count) for count in (42, 3_307_264)] == ["42", "3.3 million"]


def test_ranks_are_listed_as_one_or_as_several() -> None:
    assert [ranks_text(ranks) for ranks in ([], [3], (0, 3), range(3))] == ["", "rank 3", "ranks 0, 3", "ranks 0, 1, 2"]
    assert [ranks_text(ranks, " and ") for ranks in ([], [3], [0, 3, "5"])] == ["", "rank 3", "ranks 0, 3 and 5"]


def test_the_first_line_of_a_failure_or_its_name() -> None:
    assert first_line(RuntimeError("a\nb")) == "a"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_quantities_have_a_unit_in_any_case_and_a_bound() -> None:
    assert (parse_rate("20 Mbit"), parse_seconds("1.5min")) == (20e6, 90.0)
    for text in ("1000000001gbit", f"{'9' * 400}bit"):
        with pytest.raises(ValueError, match=r"is out of range\. Write a rate such as 20mbit"):
            parse_rate(text)
    for other in ("20", "mbit", "-1mbit", "1e3bit", "20ms", 5):
        with pytest.raises(ValueError, match="is not a rate"):
            parse_rate(other)

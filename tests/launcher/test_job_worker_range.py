from __future__ import annotations

import pytest

from gossamer.launcher.job import WorkerRange, read_worker_range


@pytest.mark.parametrize(
    ("text", "numbers"), [("2:8", (2, 8, 8)), ("2:8:4", (2, 8, 4)), ("1:1", (1, 1, 1)), ("3:3:3", (3, 3, 3))]
)
def test_a_range_names_the_least_the_most_and_perhaps_the_first(text: str, numbers: tuple[int, int, int]) -> None:
    found = read_worker_range(text)
    assert (found.least, found.most, found.initial) == numbers
    assert str(found) == ":".join(text.split(":")[:2])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8:2", "write 2:8"),
        ("0:2", "at least 1 worker"),
        ("2:8:9", "write 2:8:8"),
        ("2:8:1", "write 2:8:2"),
        ("2:", "such as 2:8"),
        ("-1:2", "such as 2:8"),
        ("2:3:4:5", "such as 2:8"),
        ("٢:٣", "such as 2:8"),
        ("1:" + "9" * 5000, "at most 65536"),
    ],
)
def test_a_range_that_cannot_be_says_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        read_worker_range(text)


def test_a_range_is_checked_however_it_is_made() -> None:
    with pytest.raises(ValueError, match="2:4:4"):
        WorkerRange(least=2, most=4, initial=5)

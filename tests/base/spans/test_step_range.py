from __future__ import annotations

import pytest

from gossamer.base.spans.step_range import StepRange, read_steps


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("100:110", (100, 105, 110), (99, 111)),
        ("7", (7,), (6, 8)),
        ("7:", (7, 10**9), (6,)),
        (":7", (1, 7), (8,)),
        (":", (1, 10**9), ()),
        ("all", (1, 10**9), ()),
    ],
)
def test_steps_are_read(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    steps = read_steps(text)
    assert all(step in steps for step in inside)
    assert not any(step in steps for step in outside)
    assert read_steps(str(steps)) == steps


@pytest.mark.parametrize("text", ["", "a", "1-2", "-1:2", "1:2:3", "train.py", "10:1"])
def test_what_names_no_steps_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"100:110|1:10"):
        read_steps(text)


def test_one_range_means_one_text() -> None:
    assert str(StepRange()) == "all"
    assert str(StepRange(3, 5)) == "3:5"

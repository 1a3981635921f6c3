from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_records import record

from gossamer.observe.panels import COMMUNICATION, TRAINING, panels, shortened, spread_apart, step_bars, ticks

places = st.lists(st.floats(-0.5, 1.5), max_size=12)


@given(places)
def test_names_keep_their_order_their_gaps_and_their_room(wanted: list[float]) -> None:
    found = spread_apart(wanted, 0.1, 0.0, 1.0)
    gap = min(0.1, 1 / max(1, len(wanted) - 1))
    ordered = [found[place] for place in sorted(range(len(wanted)), key=lambda place: wanted[place])]
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(ordered))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)


def test_names_that_do_not_collide_stay_and_those_that_do_move_as_little_as_it_takes() -> None:
    assert spread_apart([0.9, 0.1, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.9, 0.1, 0.5])
    assert spread_apart([0.5, 0.5, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55, 0.9])
    assert spread_apart([0.0, 0.0], 0.1, 0.0, 1.0) == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize(
    ("high", "low", "found"),
    [
        (1.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (63.0, 0.0, [0, 20, 40, 60]),
        (3.4, 1.4, [1.5, 2, 2.5, 3]),
        (1.0, 1.0, [1]),
    ],
)
def test_ticks_are_round_numbers(high: float, low: float, found: list[float]) -> None:
    assert ticks(high, low) == pytest.approx(found)


def test_time_comes_before_bytes() -> None:
    time, sent = panels([record("Dense()"), record("Int8()", sent=10_000.0)], "loss")
    assert (time.title, sent.title) == ("loss over time", "loss over bytes")
    assert sent.across == "MB sent per worker"
    assert [curve.across[-1] for curve in time.curves] == [4.0, 4.0]
    assert [curve.across[-1] for curve in sent.curves] == [8.0, 2.0]


def test_curves_of_many_values_are_smoothed() -> None:
    (curve,) = panels([record("Dense()")], "loss")[0].curves
    assert len(curve.smoothed) == len(curve.values) == 200
    assert curve.smoothed[100] == pytest.approx(sum(1 / step for step in range(95, 108)) / 13)
    assert panels([record("Dense()")], "accuracy")[0].empty


def test_bars_hold_what_a_step_took_and_their_parts_differ_without_color() -> None:
    (bars,) = step_bars([record("Dense()")])
    assert [(part.name, seconds) for part, seconds in bars.training] == [("computing", 0.02), ("waiting", 0.005)]
    assert [seconds for _, seconds in bars.communication] == [0.001, 0.01, 0.001]
    assert len({part.hatch for part in (*TRAINING, *COMMUNICATION)}) == 5


def test_a_long_name_keeps_both_ends() -> None:
    text = "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Int8()"
    assert shortened("home") == "home"
    assert shortened(text).startswith("DiLoCo(period=20")
    assert shortened(text).endswith("+ Int8()")
    assert len(shortened(text)) < len(text)

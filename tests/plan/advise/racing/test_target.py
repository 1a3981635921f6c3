"""When a curve reaches its target."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.plan.advise.racing.loss_curve import LossCurve
from gossamer.plan.advise.racing.target import best_reached, read_target, seconds_to, unreached_text


def _now_and_then(*values: float) -> LossCurve:
    return LossCurve.of([(100 * place, 10.0 * place, value) for place, value in enumerate(values, 1)])


def test_between_two_points_along_a_straight_line() -> None:
    assert seconds_to(_now_and_then(3.0, 2.0, 1.0), read_target("validation_loss<2.25")) == pytest.approx(17.5)


def test_a_target_above() -> None:
    assert seconds_to(_now_and_then(0.2, 0.8), read_target("accuracy>0.5")) == pytest.approx(15.0)


def test_the_first_time_counts_and_a_curve_may_begin_there() -> None:
    assert seconds_to(_now_and_then(3.0, 1.0, 3.0, 1.0), read_target("loss<2")) == pytest.approx(15.0)
    assert seconds_to(_now_and_then(1.0), read_target("loss<2")) == 10.0


def test_never() -> None:
    assert seconds_to(_now_and_then(3.0, 2.5), read_target("loss<2")) is None
    assert seconds_to(LossCurve.of([]), read_target("loss<2")) is None


def test_one_lucky_batch_is_no_arrival() -> None:
    values = np.full(100, 3.0)
    values[20], values[60:] = 0.0, 1.5
    curve = LossCurve.of([(step, float(step), value) for step, value in enumerate(values, 1)])
    arrived = seconds_to(curve, read_target("loss<2"))
    assert arrived is not None
    assert 61 <= arrived <= 70
    raw = LossCurve.of([(10 * step, at, value) for step, at, value in curve.points])  # as if logged now and then
    assert seconds_to(raw, read_target("loss<2")) == pytest.approx(20 + 1 / 3)


def test_what_came_nearest() -> None:
    curves = {"A": _now_and_then(3.0, 2.4), "B": _now_and_then(3.0, 2.3)}
    best = best_reached(curves, read_target("loss<2"))
    assert best is not None
    assert (best.name, best.value, best.seconds) == ("B", 2.3, 20.0)
    assert "the best was 2.3, by B" in unreached_text(curves, read_target("loss<2"))


@pytest.mark.parametrize("text", ["", "loss", "loss<", "<2", "loss<<2", "loss<two", "loss=2", "loss<2; import os"])
def test_what_is_no_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as validation_loss<2\.2"):
        read_target(text)

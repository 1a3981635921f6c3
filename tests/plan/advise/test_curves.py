"""When a curve reaches its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from support.planted_races import Draws, Planted

from gossamer.base.intervals import ConfidenceInterval, Floats, MeanEstimate, mean_estimate, student_quantile
from gossamer.plan.advise import curves as module
from gossamer.plan.advise.curves import (
    AgainstBaseline,
    LossCurve,
    against_baseline,
    best_reached,
    read_target,
    seconds_to,
    unreached_text,
)


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
    assert "the best value was 2.3, by B" in unreached_text(curves, read_target("loss<2"))


@pytest.mark.parametrize("text", ["", "loss", "loss<", "<2", "loss<<2", "loss<two", "loss=2", "loss<2; import os"])
def test_an_invalid_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as validation_loss<2\.2"):
        read_target(text)


# -- batch means -------------------------------------------------------------------------------------------------------


TRIALS, POINTS = 2000, 160


@pytest.mark.parametrize(
    ("confidence", "freedom", "table"),
    [(0.95, 6, 2.447), (0.8, 6, 1.440), (0.99, 6, 3.707), (0.95, 4, 2.776), (0.95, 2, 4.303), (0.95, 1, 12.706)],
)
def test_quantiles_are_those_of_the_table(confidence: float, freedom: int, table: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(table, rel=0.01)


def _noise(draw: np.random.Generator, correlation: float) -> Floats:
    """Of a first-order autoregression with a standard deviation of about 1."""
    fresh, found = draw.normal(size=POINTS), np.zeros(POINTS)
    for place in range(POINTS):
        found[place] = correlation * found[place - 1] + sqrt(1 - correlation**2) * fresh[place]
    return found


def _coverage_z(
    estimate: Callable[[Floats], MeanEstimate], confidence: float, correlation: float, trend: float
) -> float:
    """By how many standard deviations of its binomial count the interval covers more often than it says."""
    draw, line = np.random.default_rng(7), np.linspace(1, -1, POINTS)
    covered = 0
    for _ in range(TRIALS):
        found = estimate(2.0 + trend * line + _noise(draw, correlation)).interval(confidence)
        covered += found.low <= 2.0 <= found.high
    return (covered - confidence * TRIALS) / sqrt(TRIALS * confidence * (1 - confidence))


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("trend", [0.0, 1.0])
def test_the_interval_covers_as_often_as_it_says(confidence: float, trend: float) -> None:
    assert abs(_coverage_z(mean_estimate, confidence, 0.0, trend)) < 3.5


def _as_if_independent(values: Floats) -> MeanEstimate:
    return MeanEstimate(
        value=float(values.mean()), standard_error=float(values.std()) / sqrt(len(values)), freedom=len(values) - 1
    )


def test_correlated_noise_is_covered_where_single_values_would_promise_too_much() -> None:
    assert _coverage_z(mean_estimate, 0.8, 0.5, 0.0) > -9
    assert _coverage_z(_as_if_independent, 0.8, 0.5, 0.0) < -20


def test_few_values_tell_no_interval() -> None:
    assert mean_estimate(np.array([1.0, 2.0, 3.0])).interval().high == np.inf
    assert np.isnan(mean_estimate(np.array([])).value)


def test_the_standard_error_of_eight_batches_by_hand() -> None:
    """Batch means 1, -1, 1, -1, ...: the line through them takes 16 / 42 of the squares, 8, away."""
    found = mean_estimate(np.repeat([1.0, -1.0] * 4, 2))
    assert found.value == 0.0
    assert found.freedom == 6
    assert found.standard_error == pytest.approx(sqrt((8 - 16 / 42) / 6 / 8))


def test_losses_too_large_to_square_are_left_out() -> None:
    points = [(step, float(step), 1e200 if step % 2 else 1.0) for step in range(1, 33)]
    values = LossCurve.of(points).values
    assert values.tolist() == [1.0] * 16
    assert mean_estimate(values).standard_error == 0.0


# -- against baseline --------------------------------------------------------------------------------------------------


RACES, SECONDS = 400, 160.0
DENSE = Planted(step_seconds=1.0)
FASTER = Planted(step_seconds=0.25, efficiency=0.9)


def _compared(seed: int, contender: Planted, confidence: float) -> AgainstBaseline:
    draws = Draws(seed)
    curves = (
        draws.curve(name, each, int(SECONDS / each.step_seconds)) for name, each in (("A", contender), ("Dense", DENSE))
    )
    return against_baseline(*curves, SECONDS, confidence)


def _z(
    confidence: float, truth: float, interval: Callable[[AgainstBaseline], ConfidenceInterval], contender: Planted
) -> float:
    found = [interval(_compared(seed, contender, confidence)) for seed in range(RACES)]
    covered = sum(each.low <= truth <= each.high for each in found)
    return (covered - confidence * RACES) / sqrt(RACES * confidence * (1 - confidence))


def _true_difference(contender: Planted) -> float:
    steps = np.arange(121.0, 161.0)
    return float((contender.loss(steps) - DENSE.loss(steps)).mean())


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_cost_in_loss_is_covered_as_often_as_said(confidence: float) -> None:
    z = _z(confidence, _true_difference(FASTER), lambda each: each.loss_at_equal_steps, FASTER)
    assert abs(z) < 3.5


def _without_pairing(contender: LossCurve, baseline: LossCurve) -> MeanEstimate:
    first, second = (mean_estimate(each.between_steps(120, 160).values) for each in (contender, baseline))
    error = sqrt(first.standard_error**2 + second.standard_error**2)
    return MeanEstimate(value=first.value - second.value, standard_error=error, freedom=6)


def test_without_pairing_the_interval_says_far_less_than_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "paired_difference", _without_pairing)
    z = _z(0.8, _true_difference(FASTER), lambda each: each.loss_at_equal_steps, FASTER)
    assert z > 8  # all of them cover, as none would for an honest 80 %


@pytest.mark.parametrize("contender", [FASTER, replace(FASTER, efficiency=1.0), replace(DENSE, efficiency=1.3)])
def test_the_speedup_is_covered_at_least_as_often_as_said(contender: Planted) -> None:
    z = _z(0.8, contender.speedup_over(DENSE), lambda each: each.speedup, contender)
    assert z > -3.5


def test_a_speedup_is_known_to_a_few_percent() -> None:
    found = [_compared(seed, FASTER, 0.95).speedup for seed in range(40)]
    assert np.mean([each.high - each.low for each in found]) < 0.4 * FASTER.speedup_over(DENSE)
    assert all(each.low > 1 for each in found)


def test_a_contender_that_has_not_been_there_is_slower() -> None:
    behind = _compared(0, Planted(step_seconds=1.0, efficiency=0.4), 0.95).speedup
    assert behind.low == 0
    assert behind.high < 1


def test_few_steps_tell_nothing() -> None:
    curve = Draws(0).curve("A", DENSE, 3)
    assert against_baseline(curve, curve, 3.0).speedup.high == inf


BEHIND = Planted(step_seconds=1 / 60, efficiency=0.48)  # 158 steps of it are worth 76, within three of the baseline's


FAR_BEHIND = replace(BEHIND, efficiency=0.25)  # of 158 steps it has made 40 of the baseline's: a sixth is within them


def _of_one_that_ran_ahead(contender: Planted = BEHIND) -> list[ConfidenceInterval]:
    return [
        against_baseline(
            Draws(seed).curve("A", contender, 158), Draws(seed).curve("Dense", DENSE, 256), 158 / 60, 0.95
        ).speedup
        for seed in range(RACES)
    ]


def test_a_baseline_that_ran_ahead_is_looked_at_where_it_was_surely_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the steps are too many to make up for with certainty, a third is not: and what is said stays true."""
    truth, found = BEHIND.speedup_over(DENSE), _of_one_that_ran_ahead()
    covered = sum(each.low <= truth <= each.high for each in found)
    assert (covered - 0.95 * RACES) / sqrt(RACES * 0.95 * 0.05) > -3.5
    assert {each.confidence for each in found} == {0.95}
    sure = sum(each.low > 1 for each in found)
    monkeypatch.setattr(module, "LOOKS", (2,))
    assert sure > 0.9 * RACES > 2 * sum(each.low > 1 for each in _of_one_that_ran_ahead())


def test_a_recipe_that_needs_four_times_the_steps_in_a_sixtieth_of_the_time_is_surely_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a third as the earliest look, nothing is known of it."""
    truth, found = FAR_BEHIND.speedup_over(DENSE), _of_one_that_ran_ahead(FAR_BEHIND)
    covered = sum(each.low <= truth <= each.high for each in found)
    assert (covered - 0.95 * RACES) / sqrt(RACES * 0.95 * 0.05) > -3.5
    sure = sum(each.low > 1 for each in found)
    monkeypatch.setattr(module, "LOOKS", (2, 3))
    assert sure > 0.9 * RACES > 2 * sum(each.low > 1 for each in _of_one_that_ran_ahead(FAR_BEHIND))

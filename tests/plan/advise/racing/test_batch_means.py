"""Batch means: coverage of the interval, which is what it promises."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest

from gossamer.plan.advise.racing.batch_means import MeanEstimate, mean_estimate, student_quantile
from gossamer.plan.advise.racing.loss_curve import Floats, LossCurve

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

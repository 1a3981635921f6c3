"""Intervals of planted races: what is said of a contender covers what is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from support.planted_races import Draws, Planted

from gossamer.plan.advise.racing import against_baseline as module
from gossamer.plan.advise.racing.against_baseline import AgainstBaseline, against_baseline
from gossamer.plan.advise.racing.batch_means import ConfidenceInterval, MeanEstimate, mean_estimate
from gossamer.plan.advise.racing.loss_curve import LossCurve

TRIALS, SECONDS = 400, 160.0
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
    found = [interval(_compared(seed, contender, confidence)) for seed in range(TRIALS)]
    covered = sum(each.low <= truth <= each.high for each in found)
    return (covered - confidence * TRIALS) / sqrt(TRIALS * confidence * (1 - confidence))


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
        for seed in range(TRIALS)
    ]


def test_a_baseline_that_ran_ahead_is_looked_at_where_it_was_surely_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the steps are too many to make up for with certainty, a third is not: and what is said stays true."""
    truth, found = BEHIND.speedup_over(DENSE), _of_one_that_ran_ahead()
    covered = sum(each.low <= truth <= each.high for each in found)
    assert (covered - 0.95 * TRIALS) / sqrt(TRIALS * 0.95 * 0.05) > -3.5
    assert {each.confidence for each in found} == {0.95}
    sure = sum(each.low > 1 for each in found)
    monkeypatch.setattr(module, "LOOKS", (2,))
    assert sure > 0.9 * TRIALS > 2 * sum(each.low > 1 for each in _of_one_that_ran_ahead())


def test_who_needs_four_times_the_steps_in_a_sixtieth_of_the_time_is_surely_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a third as the earliest look, nothing is known of it."""
    truth, found = FAR_BEHIND.speedup_over(DENSE), _of_one_that_ran_ahead(FAR_BEHIND)
    covered = sum(each.low <= truth <= each.high for each in found)
    assert (covered - 0.95 * TRIALS) / sqrt(TRIALS * 0.95 * 0.05) > -3.5
    sure = sum(each.low > 1 for each in found)
    monkeypatch.setattr(module, "LOOKS", (2, 3))
    assert sure > 0.9 * TRIALS > 2 * sum(each.low > 1 for each in _of_one_that_ran_ahead(FAR_BEHIND))

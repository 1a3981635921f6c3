"""The clock of a simulated job, also where the recipe is chosen while training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from support.simulated_scripts import finished, script, simulated

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.plan.simulate import StepTimes
from gossamer.plan.simulate.job_clock import JobClock

DENSE = repr(Recipe())


@dataclass
class SlowLine:
    """Between two moments what travels takes long, but for what is compressed."""

    since: float
    until: float

    def step(self, recipe: Recipe, at: float) -> StepTimes:
        wire = (2.0 if recipe == Recipe() else 0.1) if self.since <= at < self.until else 0.001
        return StepTimes(seconds=0.2 + wire, waiting_seconds=wire, wire_seconds=wire)


@dataclass
class SteadyLine:
    """A second a step, and so much for telling all others something."""

    exchange_seconds: float

    def step(self, recipe: Recipe, at: float) -> StepTimes:
        return StepTimes(seconds=1.0, exchange_seconds=self.exchange_seconds)


def test_the_recipe_follows_the_virtual_line(tmp_path: Path) -> None:
    file = script(tmp_path)
    job = simulated(file, 150, recipe="Auto(local_steps=False)", clock=SlowLine(10.0, 60.0))
    try:
        assert job.advance(seconds=9.0).recipe == DENSE
        slow = job.advance(seconds=55.0)
        assert slow.recipe != DENSE
        assert job.advance(steps=149).failure is None
    finally:
        job.close()


@pytest.mark.parametrize("recipe", ["Auto(local_steps=False)", "Auto(most_steps=1.0)"])
def test_a_fast_line_costs_what_dense_costs(tmp_path: Path, recipe: str) -> None:
    file, clock = script(tmp_path), SlowLine(0.0, 0.0)
    chosen = finished(simulated(file, 40, recipe=recipe, clock=clock))
    plain = finished(simulated(file, 40, recipe="Dense()", clock=clock))
    assert chosen.recipe == DENSE
    assert chosen.digest == plain.digest
    assert chosen.seconds == plain.seconds


def test_what_workers_tell_each_other_between_steps_takes_time(tmp_path: Path) -> None:
    file = script(tmp_path)
    plain = finished(simulated(file, 40, recipe="Dense()", clock=SteadyLine(0.5)))
    chosen = finished(simulated(file, 40, recipe="Auto(most_steps=1.0)", clock=SteadyLine(0.5)))
    free = finished(simulated(file, 40, recipe="Auto(most_steps=1.0)", clock=SteadyLine(0.0)))
    looks = (chosen.seconds - plain.seconds) / 0.5
    assert looks == pytest.approx(round(looks))
    assert looks >= 1
    assert free.seconds == plain.seconds


def test_the_clock_counts_each_exchange_once_for_all_workers() -> None:
    clock = JobClock(SteadyLine(0.5), Recipe())
    assert clock.moment(1) == 1.0
    assert [clock.exchange(0), clock.exchange(0), clock.exchange(1)] == [0.5, 0.5, 0.5]
    assert clock.moment(2) == 3.0
    assert clock.moment(3) == 4.0
    assert clock.times(2).seconds == 1.0

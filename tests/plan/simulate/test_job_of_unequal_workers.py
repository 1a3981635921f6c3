"""Simulated jobs of workers with unequal speeds: virtual seconds by hand, shares, local steps and pauses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nightly import nightly
from support.simulated_scripts import finished, script, simulated

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.plan.advise.candidates import WITHOUT_WAITING
from gossamer.plan.advise.race import Race
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.simulate import ForecastClock, JobProgress, NetworkSchedule, SimulatedJob
from gossamer.train.synchronizers.speed_balance import REVIEW_STEPS, WARM_UP

WORKERS, SPEEDS = 4, (1.0, 1.0, 1.0, 0.2)
BACKWARD, REST = 0.1, 0.02
PART = BACKWARD + REST

TRAINING = """
    import sys
    import torch
    from torch import nn
    import gossamer

    world = gossamer.init()
    torch.manual_seed(7)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = gossamer.attach(model, optimizer)
    torch.manual_seed(world.rank)
    while session.steps < int(sys.argv[1]):
        loss = model(torch.randn(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item(), computed=1.0)
    session.close()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return script(tmp_path, TRAINING)


def clock(speeds: tuple[float, ...] = SPEEDS, network: str = "unlimited") -> ForecastClock:
    def profile(recipe: Recipe) -> WorkloadProfile:
        shapes = [{"weight": (1, 3)}, {"bias": (1,)}][: recipe.strategy.steady_stage.schedule.fragments]
        buckets = [
            BucketProfile(
                dtype="float32",
                shapes=each,
                ready_seconds=BACKWARD,
                computing_seconds=[0.0, 0.0],
                engine_seconds=[0.0],
                fragment=fragment,
            )
            for fragment, each in enumerate(shapes)
        ]
        return WorkloadProfile(
            recipe=repr(recipe), backward_seconds=BACKWARD, rest_seconds=REST, buckets=buckets, speeds=speeds
        )

    return ForecastClock(profile, NetworkSchedule.read(network, WORKERS), WORKERS)


def run(file: Path, recipe: str, steps: int, speeds: tuple[float, ...] = SPEEDS) -> JobProgress:
    found = finished(simulated(file, steps, recipe=recipe, workers=WORKERS, clock=clock(speeds)))
    assert found.failure is None
    assert found.steps == steps
    return found


def last_worker(shares: tuple[int, ...]) -> float:
    """Seconds of a step in which each worker makes so many passes."""
    return max((count * BACKWARD + REST) / speed for count, speed in zip(shares, SPEEDS, strict=True))


LOCK_STEP = "EveryStep(global_batch=64, batch=2, balance=True)"


def test_a_balanced_step_lasts_as_long_as_its_last_worker(file: Path) -> None:
    steps = 2 * REVIEW_STEPS
    found = run(file, LOCK_STEP, steps)
    before, after = last_worker((8, 8, 8, 8)), last_worker((10, 10, 10, 2))
    assert found.seconds == pytest.approx(REVIEW_STEPS * (before + after), rel=1e-3)
    assert found.parts == 32 * steps
    assert found.speed_use == pytest.approx(32 * steps * PART / found.seconds / sum(SPEEDS))


def test_unbalanced_lock_step_waits_for_the_slowest(file: Path) -> None:
    found = run(file, "Dense()", 5)
    assert found.seconds == pytest.approx(5 * 5 * PART, rel=1e-3)
    assert found.parts == 5 * WORKERS
    assert found.speed_use == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    "recipe",
    ["LocalSGD(20, balance=True)", "DiLoCo(20, fragments=2, balance=True)", "DiLoCo(20, delay=2, balance=True)"],
)
def test_a_round_of_local_steps_by_speed_lasts_as_long_as_its_last_worker(file: Path, recipe: str) -> None:
    """The first round is made of equal numbers of local steps. A delayed round changes the next but one."""
    rounds, equal = 4, 1 + ("delay" in recipe)
    found = run(file, recipe, 20 * rounds)
    assert found.seconds == pytest.approx((equal * 5 + (rounds - equal)) * 20 * PART, rel=1e-3)
    assert found.parts == equal * 80 + (rounds - equal) * 64


def test_losses_are_at_the_virtual_seconds_of_their_position(file: Path) -> None:
    found = run(file, "LocalSGD(4, balance=True)", 24, (1.0, 1.0, 1.0, 0.5))
    losses = {step: second for step, second, _ in found.metrics["loss"]}
    first = 4 * PART * 2
    assert losses[4] == pytest.approx(first, rel=1e-3)
    assert losses[8] == pytest.approx(first + 4 * PART, rel=1e-3)
    assert losses[9] == pytest.approx(first + 5 * PART, rel=1e-3)
    assert len(losses) == 24


def test_balance_at_equal_speeds_is_the_plain_recipe(file: Path) -> None:
    for balanced, plain in (("LocalSGD(4, balance=True)", "LocalSGD(4)"), (LOCK_STEP, "EveryStep(accumulate=8)")):
        found, expected = (run(file, recipe, 12, (1.0,) * WORKERS) for recipe in (balanced, plain))
        assert found.digest == expected.digest
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-4)
        assert found.parts == expected.parts


@pytest.mark.parametrize(
    ("recipe", "period", "most"),
    [
        (LOCK_STEP, 1, 36),
        ("LocalSGD(6, balance=True)", 6, 36),
        *nightly(("LocalSGD(20, balance=True)", 20, 60)),
    ],
)
def test_pauses_change_nothing_and_local_steps_pause_after_a_period(
    file: Path, recipe: str, period: int, most: int
) -> None:
    whole = run(file, recipe, most)
    halting = simulated(file, most, recipe=recipe, workers=WORKERS, clock=clock())
    seen = [halting.advance(steps=steps).steps for steps in (1, 7, 22)]
    assert seen == [-(-steps // period) * period for steps in (1, 7, 22)]
    late = halting.advance(seconds=0.9 * whole.seconds)
    assert late.seconds <= 0.9 * whole.seconds
    assert late.steps % period == 0
    assert finished(halting) == whole


def test_a_loop_may_end_within_a_period(file: Path) -> None:
    found = finished(simulated(file, 50, recipe="LocalSGD(20, balance=True)", workers=WORKERS, clock=clock()))
    assert found.failure is None
    assert found.steps == 50


def test_speeds_are_measured_after_the_warm_up_not_assumed(file: Path) -> None:
    """Sessions of a simulated job learn the speeds as in a run: shares change at the first review after WARM_UP."""
    found = run(file, LOCK_STEP, REVIEW_STEPS)
    assert WARM_UP < REVIEW_STEPS
    assert found.seconds == pytest.approx(REVIEW_STEPS * last_worker((8, 8, 8, 8)), rel=1e-3)


def test_recipes_by_speed_win_a_race_of_unequal_workers(file: Path) -> None:
    """They are compared at equal virtual seconds, of which lock step spends five times as many per step."""
    seen = clock()

    def start(recipe: str, factor: float) -> SimulatedJob:
        return SimulatedJob(file, ["100000"], recipe, WORKERS, clock=seen, learning_rate_factor=factor)

    names = ["LocalSGD(8, balance=True)", "LocalSGD(8)", LOCK_STEP]
    found = Race(start=start, baseline="Dense()", challengers=names, budget_seconds=3600.0, most_steps=560).run()
    assert not any(each.failure for each in found.contenders)
    paces = {each.recipe: each.steps / each.seconds for each in found.contenders}
    assert paces["LocalSGD(8, balance=True)"] == pytest.approx(1 / PART, rel=0.1)
    assert paces["LocalSGD(8)"] == pytest.approx(paces["Dense()"], rel=0.1)
    assert found.contenders[1].recipe == "LocalSGD(8, balance=True)"


def test_recipes_that_wait_for_none_are_raced_with_the_others(file: Path) -> None:
    seen = clock(network="100mbit,20ms")

    def start(recipe: str, factor: float) -> SimulatedJob:
        return SimulatedJob(file, ["100000"], recipe, WORKERS, clock=seen, learning_rate_factor=factor)

    found = Race(
        start=start, baseline="Dense()", challengers=list(WITHOUT_WAITING), budget_seconds=3600.0, most_steps=64
    ).run()
    assert not any(each.failure for each in found.contenders)
    assert {each.recipe for each in found.contenders} == {"Dense()", *WITHOUT_WAITING}
    paces = {each.recipe: each.steps / each.seconds for each in found.contenders if each.seconds}
    assert paces["AsyncDiLoCo(period=24)"] == pytest.approx(1 / PART, rel=0.1)
    assert paces["Dense()"] == pytest.approx(1 / PART / 5, rel=0.4)
    first = found.contenders[1]
    assert first.against is not None
    assert first.against.steps_ratio > 0

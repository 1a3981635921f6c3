"""Networks that change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from support.simulated_scripts import finished, script, simulated

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.comm.network import read_network
from gossamer.comm.network.parse import NetworkError
from gossamer.plan.estimate.step_time import estimate_step_time
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.simulate import ForecastClock, NetworkSchedule, StepTimes
from gossamer.plan.simulate.clock import JobClock


def test_a_network_is_in_force_from_its_moment_on() -> None:
    schedule = NetworkSchedule.read("100mbit,20ms; 10mbit,20ms at 30s; 1gbit at 2min", 3)
    rates = [schedule.at(second).hosts[0].up_bits_per_second for second in (0, 29.9, 30, 119, 120, 1e9)]
    assert rates == [1e8, 1e8, 1e7, 1e7, 1e9, 1e9]
    assert {len(network.hosts) for _, network in schedule.changes} == {3}
    assert schedule.at(0).default.round_trip_seconds == 0.02


def test_one_network_is_a_schedule() -> None:
    assert [since for since, _ in NetworkSchedule.read("100mbit", 2).changes] == [0.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a rate"),
        ("100mbit at 0s", "is not"),
        ("100mbit; 10mbit", "'10mbit' has no time"),
        ("100mbit; 10mbit at noon", "has no time"),
        ("100mbit; 10mbit at 3 parsecs", "has no time"),
        ("100mbit; at 3s", "has no time"),
        ("100mbit; 10 at 3s", "'10' is not a rate"),
        ("100mbit; 10mbit at 9s; 1gbit at 3s", "change at 9 s, 3 s, which must be in ascending order"),
        ("100mbit; 10mbit at 0s", "must be in ascending order"),
        ("100mbit,20ms,lost=3", "lost is not part of a network"),
        ("100mbit;", "'' has no time"),
    ],
)
def test_an_unreadable_text_is_refused_with_its_words(text: str, reason: str) -> None:
    with pytest.raises(NetworkError, match=reason):
        NetworkSchedule.read(text, 2)


def test_an_empty_schedule_is_none() -> None:
    with pytest.raises(NetworkError, match="must begin with a network at second 0"):
        NetworkSchedule(())


# -- step clock --------------------------------------------------------------------------------------------------------


WORKERS, ENTRIES = 4, 250_000


def profile(recipe: Recipe) -> WorkloadProfile:
    bucket = BucketProfile(
        dtype="float32",
        shapes={"weight": (500, 500)},
        ready_seconds=0.1,
        computing_seconds=[0.0, 0.0],
        engine_seconds=[0.0],
    )
    return WorkloadProfile(
        recipe=repr(recipe), backward_seconds=0.1, rest_seconds=0.02, buckets=[bucket], control_bytes=16
    )


def test_a_step_takes_what_is_estimated_for_the_network_in_force() -> None:
    measured: list[Recipe] = []
    recipe = resolve("Dense()", WORKERS)
    clock = ForecastClock(
        lambda each: measured.append(each) or profile(each),  # type: ignore[func-returns-value]
        NetworkSchedule.read("100mbit,20ms; 10mbit,20ms at 30s", WORKERS),
        WORKERS,
    )
    fast, slow = clock.step(recipe, 0.0), clock.step(recipe, 30.0)
    for found, text in ((fast, "100mbit,20ms"), (slow, "10mbit,20ms")):
        estimated = estimate_step_time(recipe, profile(recipe), read_network(text, WORKERS), WORKERS)
        assert (found.seconds, found.waiting_seconds) == (estimated.step_seconds, estimated.waiting_seconds)
    assert slow.seconds > fast.seconds
    assert clock.step(recipe, 29.9) is fast
    assert measured == [recipe]  # once for each recipe, whatever the network


def test_bytes_are_those_of_a_step_on_any_network() -> None:
    recipe = resolve("Dense()", WORKERS)
    found = ForecastClock(profile, NetworkSchedule.read("100mbit", WORKERS), WORKERS).step(recipe, 0.0)
    ring = 2 * (WORKERS - 1) / WORKERS * 4 * ENTRIES
    assert ring <= found.bytes_sent < ring + 100


@pytest.mark.parametrize("recipe", ["ParameterServer(mode='async')", "Gossip('pairwise')"])
def test_workers_that_do_not_wait_for_each_other_have_compute_times_and_lines(recipe: str) -> None:
    clock = ForecastClock(profile, NetworkSchedule.read("100mbit; 10mbit at 5s", WORKERS), WORKERS)
    found, later = (clock.step(resolve(recipe, WORKERS), second) for second in (0.0, 5.0))
    assert found.part_seconds == later.part_seconds
    assert len(set(found.part_seconds)) == 1
    assert found.lines is not None
    assert later.lines is not None
    assert (found.lines.text, later.lines.text) == ("100mbit", "10mbit")


# -- job clock ---------------------------------------------------------------------------------------------------------


DENSE = repr(Recipe())


@dataclass
class SlowLine:
    """Between two moments what travels takes long, but for what is compressed."""

    since: float
    until: float

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        wire = (2.0 if recipe == Recipe() else 0.1) if self.since <= at < self.until else 0.001
        return StepTimes(seconds=0.2 + wire, waiting_seconds=wire, wire_seconds=wire)


@dataclass
class SteadyLine:
    """A second a step, and so much for telling all others something."""

    exchange_seconds: float

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
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

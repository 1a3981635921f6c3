"""The forecast as a clock."""

from __future__ import annotations

import pytest

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.comm.network import read_network
from gossamer.plan.cost.step_time import estimate_step_time
from gossamer.plan.cost.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.simulate import ForecastClock, NetworkSchedule, SimulationError

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


def test_a_step_takes_what_is_foretold_for_the_network_in_force() -> None:
    measured: list[Recipe] = []
    recipe = resolve("Dense()", WORKERS)
    clock = ForecastClock(
        lambda each: measured.append(each) or profile(each),  # type: ignore[func-returns-value]
        NetworkSchedule.read("100mbit,20ms; 10mbit,20ms at 30s", WORKERS),
        WORKERS,
    )
    fast, slow = clock.step(recipe, 0.0), clock.step(recipe, 30.0)
    for found, text in ((fast, "100mbit,20ms"), (slow, "10mbit,20ms")):
        foretold = estimate_step_time(recipe, profile(recipe), read_network(text, WORKERS), WORKERS)
        assert (found.seconds, found.waiting_seconds) == (foretold.step_seconds, foretold.waiting_seconds)
    assert slow.seconds > fast.seconds
    assert clock.step(recipe, 29.9) is fast
    assert measured == [recipe]  # once for each recipe, whatever the network


def test_bytes_are_those_of_a_step_on_any_network() -> None:
    recipe = resolve("Dense()", WORKERS)
    found = ForecastClock(profile, NetworkSchedule.read("100mbit", WORKERS), WORKERS).step(recipe, 0.0)
    ring = 2 * (WORKERS - 1) / WORKERS * 4 * ENTRIES
    assert ring <= found.bytes_sent < ring + 100


@pytest.mark.parametrize("recipe", ["ParameterServer(mode='async')", "Gossip('pairwise')"])
def test_workers_that_do_not_wait_for_each_other_have_no_clock(recipe: str) -> None:
    clock = ForecastClock(profile, NetworkSchedule.read("100mbit", WORKERS), WORKERS)
    with pytest.raises(SimulationError, match="not foretold where workers do not wait for each other"):
        clock.step(resolve(recipe, WORKERS), 0.0)

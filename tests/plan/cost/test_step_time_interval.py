"""Step time's interval: as wide as past errors were, wider where the profile's own steps and codec timings differed."""

from dataclasses import replace
from math import log

import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.plan.cost.step_time import estimate_step_time
from gossamer.plan.cost.workload_profile import BucketProfile, OtherLoad, WorkloadProfile


def told_of(timed_steps=(), codec_spread=0.0, **changes):
    """A dense step whose profile differed so much: 0.25 s of computing, and some waiting."""
    only = BucketProfile(
        dtype="float32",
        shapes={"a": (1000, 1000)},
        ready_seconds=0.1,
        computing_seconds=[0.001, 0.001],
        engine_seconds=[0.0],
        spread_seconds=codec_spread,
    )
    model = WorkloadProfile(
        recipe="Dense()",
        backward_seconds=0.2,
        rest_seconds=0.05,
        buckets=[only],
        timed_steps=timed_steps,
        **changes,
    )
    return estimate_step_time(resolve("Dense"), model, read_network("100mbit", 2), 2)


STEADY_STEPS, UNSTEADY_STEPS = [0.25, 0.251, 0.249] * 2, [0.25, 0.30, 0.20] * 2


def check_wider_where_the_profile_differed(told):
    widths = [
        log(found.interval.high_seconds / found.interval.low_seconds)
        for found in (told(STEADY_STEPS), told(UNSTEADY_STEPS), told(UNSTEADY_STEPS, codec_spread=0.05))
    ]
    assert widths == sorted(set(widths))
    assert all(found.interval.holds(found.step_seconds) for found in (told(STEADY_STEPS), told(UNSTEADY_STEPS)))


def test_steps_that_differed_make_a_wider_interval():
    check_wider_where_the_profile_differed(told_of)


def test_an_interval_that_does_not_look_at_the_profile_is_noticed():
    with pytest.raises(AssertionError):
        check_wider_where_the_profile_differed(lambda *_, **__: told_of(STEADY_STEPS))


def test_what_computing_differs_counts_by_its_part_in_the_step():
    found = told_of(UNSTEADY_STEPS)
    assert found.waiting_share > 0.1
    assert found.interval.spread == pytest.approx(1.4826 * 0.2 * (1 - found.waiting_share))


def test_a_busy_machine_is_told_of():
    load = OtherLoad(cores=2, own=1.0, other=1.0, running=0.5, ready=0.5)
    said = told_of(STEADY_STEPS, other_load=load).caution
    assert "other work kept 1.0 of 2 cores busy" in said
    assert "2.00x as long" in said
    assert told_of(STEADY_STEPS, other_load=replace(load, other=0.0, running=1.0, ready=0.0)).caution is None

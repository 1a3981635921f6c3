from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.cli.explain import explain
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.errors import GossamerError
from gossamer.plan.cost.schedule_simulator import Trip, run_sites, run_turns
from gossamer.plan.cost.step_simulator import BucketJob, run_step
from gossamer.plan.cost.step_time import StepTimeEstimate, estimate_step_time, plan
from gossamer.plan.cost.workload_profile import BucketProfile, OtherLoad, WorkloadProfile


def floats(numel):
    return torch.empty(numel, device="meta")


WORD = AllGather((floats(1),))


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)


class Fixed:
    """Every op takes ten seconds after the last rank has said it, every broadcast one."""

    def answer(self, ops, starts):
        return [max(starts) + 10.0] * len(starts)

    def broadcast(self, nbytes, starts):
        return [max(starts) + 1.0] * len(starts)


def measured(**changes):
    return WorkloadProfile(**{"recipe": "", "backward_seconds": 20.0, "rest_seconds": 4.0, "buckets": []} | changes)


def job(ready, *rounds, last=0.0):
    return BucketJob(ready_seconds=ready, rounds=[(seconds, WORD, 0.0) for seconds in rounds], last_seconds=last)


@pytest.mark.parametrize(
    ("jobs", "end", "waiting", "wire", "codec"),
    [
        ([], 24.0, 0.0, 0.0, 0.0),
        ([job(5.0, 1.0)], 24.0, 0.0, 10.0, 1.0),  # hidden: 5 + 1 + 10 < 20
        ([job(20.0, 1.0, last=2.0)], 37.0, 13.0, 10.0, 3.0),  # all after backward
        ([job(5.0, 1.0), job(6.0, 1.0)], 24.0, 0.0, 10.0, 2.0),  # the second leaves at 7, while the first travels
        ([job(2.0, 1.0), job(18.0, 1.0)], 33.0, 9.0, 10.0, 2.0),  # nobody waits for the first, there since 13
        ([job(20.0, 1.0, 3.0, last=2.0)], 50.0, 26.0, 20.0, 6.0),  # two rounds
        ([job(20.0, 1.0, 3.0, last=2.0)] * 2, 53.0, 29.0, 17.0, 12.0),  # of two: 9 s and 7 s for one, 1 s for the other
        ([job(2.0, 1.0, 1.0), job(18.0, 1.0)], 34.0, 10.0, 10.0, 3.0),  # the second op waits for its turn at 19
    ],
)
def test_the_lane_is_a_queue(jobs, end, waiting, wire, codec):
    step = run_step(jobs, measured(), Fixed(), [0.0, 0.0])
    assert (step.ends, step.waiting) == ([end] * 2, [waiting] * 2)
    assert (step.wire, step.codec) == ([wire] * 2, [codec] * 2)


def test_steps_begin_where_the_last_one_ended():
    step = run_step([job(20.0, 0.0)], measured(), Fixed(), [100.0, 103.0])
    assert step.ends == [137.0, 137.0]
    assert step.waiting == [13.0, 10.0]


def test_on_crowded_processors_the_codec_and_backward_take_turns():
    """At 10 both want the core: the codec's 4 seconds take 8, and backward's last 10 take 14."""
    step = run_step([job(10.0, 4.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [28.0 + 4.0]
    alone = run_step([job(10.0, 4.0)], measured(), Fixed(), [0.0])
    assert alone.ends == [24.0 + 4.0]


def test_after_backward_there_is_nothing_to_share():
    work = [job(20.0, 4.0)]
    assert run_step(work, measured(crowded=True), Fixed(), [0.0]) == run_step(work, measured(), Fixed(), [0.0])


def test_what_is_delayed_is_ready_later():
    step = run_step([job(1.0, 4.0), job(15.0, 0.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [29.0 + 4.0]  # the second is ready at 15 + 4, when the communication thread just became free
    assert step.codec == [8.0]


def test_buffers_follow_the_last_bucket():
    step = run_step([job(20.0, 0.0)], measured(buffer_bytes=[8, 8, 8]), Fixed(), [0.0, 0.0])
    assert step.waiting == [13.0, 13.0]
    assert run_step([], measured(buffer_bytes=[8]), Fixed(), [0.0]).wire == [0.0]


def bucket(rounds, **shapes):
    return BucketProfile(
        dtype="float32",
        shapes=shapes,
        ready_seconds=0.1,
        computing_seconds=[0.001] * (rounds + 1),
        engine_seconds=[0.0] * rounds,
    )


def test_the_last_bucket_takes_the_control_word_along():
    model = measured(buckets=[bucket(1, a=(50, 50)), bucket(1, b=(60, 60), c=(7,))], control_bytes=23)
    first, last = plan(resolve("Dense"), model, 4)
    assert [type(op) for _, op, _ in first.rounds] == [AllReduceMean]
    ((_, op, _),) = last.rounds
    assert isinstance(op, Coalesced)
    assert [type(each) for each in op.ops] == [AllReduceMean, AllGather]
    assert op.ops[1].payload[0].nbytes == 23


def test_a_compressor_of_several_rounds_has_a_computing_time_before_each():
    (only,) = plan(resolve("PowerSGD(rank=2)"), measured(buckets=[bucket(2, a=(50, 50))], control_bytes=23), 4)
    assert [type(op) for _, op, _ in only.rounds] == [Coalesced, AllReduceMean]


def test_foretold_is_compute_and_what_the_network_adds():
    model = measured(
        backward_seconds=0.2, rest_seconds=0.05, buckets=[bucket(1, a=(1000, 1000))], control_bytes=23, copies=2
    )
    told = estimate_step_time(resolve("Dense"), model, read_network("100mbit", 2), 2)
    line = 4e6 * 1526 / 1448 * 8 / 100e6
    assert told.wire_seconds == pytest.approx(line, rel=0.01)
    assert told.step_seconds == pytest.approx(0.05 + max(0.2, 0.102 + line), rel=0.01)
    assert told.waiting_share == pytest.approx(told.waiting_seconds / told.step_seconds)
    assert told.inputs["network"] == "100mbit"
    assert told.inputs["copies_measured_side_by_side"] == 2


def test_alone_there_is_nothing_to_wait_for():
    model = measured(buckets=[bucket(1, a=(10, 10))])
    told = estimate_step_time(resolve("Dense"), model, read_network("1mbit,1s", 1), 1)
    assert told == StepTimeEstimate(
        step_seconds=24.0,
        waiting_seconds=0.0,
        wire_seconds=0.0,
        codec_seconds=0.0,
        inputs=told.inputs,
        interval=told.interval,
    )


def test_more_hosts_than_workers_leave_the_rest_out():
    model = measured(buckets=[bucket(1, a=(100, 100))], control_bytes=23)
    two = estimate_step_time(resolve("Dense"), model, read_network("1mbit,1s", 2), 2)
    assert estimate_step_time(resolve("Dense"), model, read_network("1mbit,1s", 8), 2).step_seconds == two.step_seconds


def test_measurements_survive_json():
    model = measured(buckets=[bucket(1, a=(10, 10))], other_load=OtherLoad(cores=2, own=0.5))
    assert WorkloadProfile.from_json(model.to_json()) == model


# -- strategies that talk less, in virtual time ------------------------------------------------------------------------


def turns(schedule, *trips, world=2, **changes):
    found = run_turns(trips, schedule, measured(**changes), Fixed(), world)
    return found.seconds, found.waiting, found.wire, found.codec


def trip(*jobs, offering=0.0, landing=0.0):
    return Trip(jobs=jobs, offering_seconds=offering, landing_seconds=landing)


PASS = 24.0  # seconds; an op takes ten


@pytest.mark.parametrize(
    ("schedule", "ops", "seconds", "waiting"),
    [
        (PeriodicSchedule(5), 1, (5 * PASS + 2 + 11 + 3) / 5, 11 / 5),  # nobody trains meanwhile
        (PeriodicSchedule(5, delay=1), 1, (5 * PASS + 2 + 3) / 5, 0.0),  # 11 < 24: hidden
        (PeriodicSchedule(5, delay=1), 3, (5 * PASS + 2 + 33 + 3 - PASS) / 5, (33 - PASS) / 5),  # 33 > 24
        (PeriodicSchedule(5, delay=2), 3, (5 * PASS + 2 + 3) / 5, 0.0),
        (PeriodicSchedule(1), 1, PASS + 2 + 11 + 3, 11.0),
        (PeriodicSchedule(1, delay=1), 3, 33.0, 33 - PASS - 5),  # the communication thread never rests
        (PeriodicSchedule(1, delay=3), 3, 33.0, 33 - PASS - 5),  # and a longer delay does not help it
        (PeriodicSchedule(1, delay=3), 2, PASS + 5, 0.0),
    ],
)
def test_training_waits_for_what_has_not_landed(schedule, ops, seconds, waiting):
    """2 seconds of offering, 1 of computing before each op, 3 of landing."""
    going = trip(job(0.0, *[1.0] * ops), offering=2.0, landing=3.0)
    on_lane = 10 * ops / schedule.period, ops / schedule.period
    assert turns(schedule, going) == pytest.approx((seconds, waiting, *on_lane))


def test_fragments_take_turns_on_one_lane():
    """The long one still occupies the communication thread when the short one leaves: 96 seconds of 42 + 11 in 4."""
    long, short = trip(job(0.0, *[0.5] * 4)), trip(job(0.0, 1.0))
    assert turns(PeriodicSchedule(4, fragments=2, delay=1), long, short)[:2] == pytest.approx(
        ((96 + 42 - 24) / 4, (42 - 24) / 4)
    )
    assert turns(PeriodicSchedule(4, fragments=2, delay=2), long, short)[:2] == pytest.approx((24.0, 0.0))
    assert turns(PeriodicSchedule(2, fragments=2, delay=1), long, short)[:2] == pytest.approx(
        ((48 + 42 - 24) / 2, (42 - 24) / 2)
    )


def test_who_comes_is_known_before_anything_else_leaves():
    """The participation poll takes 10 seconds; one bucket leaves at 11, the other at 12, which is there at 22."""
    going = trip(job(0.0, 0.0), job(0.0, 1.0), job(0.0, 1.0))
    assert turns(PeriodicSchedule(2), going) == pytest.approx(((48 + 22) / 2, 22 / 2, 20 / 2, 2 / 2))
    with pytest.raises(AssertionError):
        assert turns(PeriodicSchedule(2), trip(job(0.0), *going.jobs)) == pytest.approx(
            turns(PeriodicSchedule(2), going)
        )


def test_on_crowded_processors_a_turn_slows_training():
    """Computing on the communication thread takes twice as long beside training, which loses as much as it is given."""
    going = trip(job(0.0, 4.0, last=2.0))
    assert turns(PeriodicSchedule(2, delay=1), going, crowded=True) == pytest.approx(((48 + 6) / 2, 0.0, 5.0, 12 / 2))
    assert turns(PeriodicSchedule(2, delay=1), going) == pytest.approx((24.0, 0.0, 5.0, 3.0))
    assert turns(PeriodicSchedule(2), going, crowded=True) == pytest.approx(((48 + 16) / 2, 8.0, 5.0, 3.0))


def test_training_is_slowed_only_until_it_waits():
    """Of the communication thread's 30 seconds 24 are shared and take twice as long; then training waits."""
    going = trip(job(0.0, 30.0))
    (seconds, waiting, _, codec) = turns(PeriodicSchedule(2, delay=1), going, crowded=True)
    assert codec == pytest.approx((24 * 2 + 6) / 2)
    assert waiting == pytest.approx(16 / 2)
    assert seconds == pytest.approx((48 + 24 + 16) / 2)


def test_sites_step_on_their_own_and_wait_for_turns():
    inner, going = [job(20.0, 1.0)], trip(job(0.0, 1.0), offering=2.0, landing=3.0)
    found = run_sites(inner, [going], PeriodicSchedule(6), measured(), Fixed(), Fixed(), 4)
    assert found.seconds == pytest.approx((6 * 35 + 2 + 11 + 3) / 6)
    assert found.waiting == pytest.approx((6 * 11 + 11) / 6)
    assert (found.wire, found.codec) == pytest.approx(((6 * 10 + 10) / 6, (6 + 1) / 6))
    found = run_sites(inner, [going], PeriodicSchedule(2), measured(), Fixed(), Fixed(), 4)
    assert found.seconds == pytest.approx((2 * 35 + 2 + 11 + 3) / 2)


MEGABYTES = 4e6 * 1526 / 1448 * 8 / 100e6  # seconds of the line, for a million parameters on two workers


def told(text, spec="100mbit", workers=2, **changes):
    model = measured(
        **{"backward_seconds": 0.2, "rest_seconds": 0.05, "buckets": [bucket(1, a=(1000, 1000))], "control_bytes": 23}
        | changes
    )
    return estimate_step_time(resolve(text), model, read_network(spec, workers), workers)


def test_a_period_is_averaged():
    every = told("EveryStep()")
    seldom = told("LocalSGD(10)")
    assert seldom.step_seconds == pytest.approx(0.25 + (MEGABYTES + 0.002) / 10, rel=0.01)
    assert seldom.waiting_seconds == pytest.approx((MEGABYTES + 0.002) / 10, rel=0.02)
    assert seldom.wire_seconds == pytest.approx(every.wire_seconds / 10, rel=0.02)
    assert seldom.inputs["backward_passes"] == 10
    assert told("PostLocalSGD(10, start=500)").step_seconds == seldom.step_seconds
    assert told("LocalSGD(10)", workers=1).step_seconds == 0.25


def test_what_travels_while_training_goes_on_is_hidden():
    assert told("DiLoCo(10)").step_seconds > 0.27
    assert told("DiLoCo(10, delay=2)").step_seconds == pytest.approx(0.25)
    assert told("EveryStep(delay=1)").step_seconds == pytest.approx(MEGABYTES + 0.002, rel=0.01)
    assert told("DelayedAveraging(delay=2, period=2)").step_seconds == pytest.approx(0.25)


@pytest.mark.parametrize(("collective", "gather_seconds"), [("", 0.5), ("engine", 1.0)])
def test_every_turn_begins_with_a_meeting(collective, gather_seconds, monkeypatch):
    """One way, or there and back where messages wait for their receivers; and the half of the backward pass that an
    exchange of gradients hides behind, which a sync round comes after."""
    monkeypatch.setenv("GOSSAMER_COLLECTIVE", collective)
    meeting = told("LocalSGD(1)", "1gbit,1s").step_seconds - told("EveryStep()", "1gbit,1s").step_seconds
    assert meeting == pytest.approx(gather_seconds + 0.1, rel=0.01)


def test_what_is_averaged_along_takes_its_time():
    assert told("LocalSGD(10)", rider_bytes=[8_000_000]).wire_seconds == pytest.approx(3 * MEGABYTES / 10, rel=0.01)
    fragments = [bucket(1, a=(1000, 1000)), replace(bucket(1, b=(1000, 1000)), fragment=1)]
    said = told("DiLoCo(10, fragments=2)", buckets=fragments, rider_bytes=[0, 4_000_000])
    assert said.wire_seconds == pytest.approx(3 * MEGABYTES / 10, rel=0.01)


def test_passes_that_accumulate_talk_to_nobody():
    once, four = told("EveryStep()"), told("EveryStep(accumulate=4)")
    assert four.step_seconds == pytest.approx(once.step_seconds + 3 * 0.2)
    assert (four.waiting_seconds, four.wire_seconds) == pytest.approx((once.waiting_seconds, once.wire_seconds))


def test_sites_talk_over_their_own_lines():
    """Within a site every step, between sites every tenth; both over the same rate here."""
    said = told("LocalSGD(10, per_site=2)", workers=4, site_buckets=[bucket(1, a=(1000, 1000))], site_control_bytes=23)
    inside = told("EveryStep()").step_seconds
    assert said.step_seconds == pytest.approx(inside + 1.5 * MEGABYTES / 10, rel=0.02)


TWO_SITES = """
[[hosts]]
count = 2
site = "west"
rate = "100mbit"
[[hosts]]
count = 2
site = "east"
rate = "100mbit"
[[paths]]
between = ["west", "east"]
round_trip = "500ms"
"""


def test_slow_paths_between_sites_do_not_slow_what_is_inside(tmp_path):
    """Once in 50 steps everyone pays for the ops between sites, over connections that had nothing to do meanwhile."""
    spec = tmp_path / "two-sites.toml"
    spec.write_text(TWO_SITES)
    buckets = {"site_buckets": [bucket(1, a=(1000, 1000))], "site_control_bytes": 23}
    inside = told("EveryStep()").step_seconds
    far = told("EveryStep()", str(spec), workers=4).step_seconds
    said = told("LocalSGD(50, per_site=2)", str(spec), workers=4, **buckets).step_seconds
    network = read_network(str(spec), 4)
    bucket_and_control = Coalesced((AllReduceMean(floats(1_000_000)), AllGather((floats(6),))))
    turn = 0.002 + sum(seconds(op, network) for op in (AllGather((floats(4),)), bucket_and_control))
    assert said == pytest.approx(inside + turn / 50, rel=1e-3)
    assert said < far
    with pytest.raises(AssertionError):
        assert said == pytest.approx(inside + far / 50, rel=1e-3)  # theirs are never idle


# -- which way means take ----------------------------------------------------------------------------------------------


def test_a_topology_chooses_how_means_are_taken():
    """One number for each of four workers: there and back, six hops around a ring, two pairs and back, two sites."""
    few = {"workers": 4, "buckets": [bucket(1, a=(2, 2))]}
    hops = {"Dense()": 2, "Ring()": 6, "Exponential()": 4, "Hierarchy(per_node=2)": 4}
    step = {recipe: told(recipe, "1gbit,1s", **few) for recipe in hops}
    for recipe, count in hops.items():
        assert step[recipe].wire_seconds == pytest.approx(count / 2, rel=0.01)
    collectives = [each.inputs["collective"] for each in step.values()]
    assert collectives == ["auto", "ring", "halving", "hierarchical(2)"]


def test_the_environment_beats_the_recipe(monkeypatch):
    monkeypatch.setenv("GOSSAMER_COLLECTIVE", "direct")
    said = told("Ring()", "1gbit,1s", workers=4, buckets=[bucket(1, a=(2, 2))])
    assert said.wire_seconds == pytest.approx(2 / 2, rel=0.01)
    monkeypatch.setenv("GOSSAMER_COLLECTIVE", "circle")
    with pytest.raises(GossamerError, match=r"GOSSAMER_COLLECTIVE .* 'circle' is no collective: write one of auto"):
        told("Dense()")


def test_explain_prices_the_way_that_was_chosen(monkeypatch):
    def explained(recipe):
        options = ["--network", "100mbit,1s", "--step-seconds", "1", "--parameters", "1000"]
        answer = CliRunner().invoke(explain, [recipe, *options])
        return answer.exit_code, answer.output

    assert "foretold for 100mbit,1s:" in explained("Dense()")[1]
    assert "foretold for 100mbit,1s, means by ring:" in explained("Dense() + Ring()")[1]
    monkeypatch.setenv("GOSSAMER_COLLECTIVE", "circle")
    code, output = explained("Dense()")
    assert code == 1
    assert "Error: GOSSAMER_COLLECTIVE says how means are taken, and 'circle' is no collective" in output

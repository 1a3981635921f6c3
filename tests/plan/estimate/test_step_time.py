from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from click.testing import CliRunner

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.forms_by_speed import speed_use
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.cli.explain import explain
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.errors import GossamerError
from gossamer.plan.estimate.step_time import StepTimeEstimate, estimate_step_time, plan
from gossamer.plan.estimate.workload_profile import BucketProfile, OtherLoad, WorkloadProfile


def floats(numel):
    return torch.empty(numel, device="meta")


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)


def measured(**changes):
    return WorkloadProfile(**{"recipe": "", "backward_seconds": 20.0, "rest_seconds": 4.0, "buckets": []} | changes)


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


def test_estimated_is_compute_and_what_the_network_adds():
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


def test_what_travels_while_training_continues_is_hidden():
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


def test_sites_communicate_over_their_own_lines():
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
    with pytest.raises(GossamerError, match=r"GOSSAMER_COLLECTIVE.* unknown collective 'circle'"):
        told("Dense()")


def test_explain_prices_the_way_that_was_chosen(monkeypatch):
    def explained(recipe):
        options = ["--network", "100mbit,1s", "--step-seconds", "1", "--parameters", "1000"]
        answer = CliRunner().invoke(explain, [recipe, *options])
        return answer.exit_code, answer.output

    assert "estimated for 100mbit,1s:" in explained("Dense()")[1]
    assert "estimated for 100mbit,1s, all-reduce by ring:" in explained("Dense() + Ring()")[1]
    monkeypatch.setenv("GOSSAMER_COLLECTIVE", "circle")
    code, output = explained("Dense()")
    assert code == 1
    assert "Error: invalid GOSSAMER_COLLECTIVE, the all-reduce algorithm: unknown collective 'circle'" in output


# -- Step time's interval: as wide as past errors were, wider where the profile's own steps and codec timings differe


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


# -- Step times of workers of unequal speed: identities, and figures by hand -------------------------------------------

SPEEDS = 1.0, 1.0, 1.0, 0.2
BACKWARD, REST = 0.2, 0.05
INSTANT, SLOW = "unlimited", "100mbit,20ms"


def profile(speeds: tuple[float, ...] = (), fragments: int = 1, codec: float = 0.0) -> WorkloadProfile:
    buckets = [
        BucketProfile(
            dtype="float32",
            shapes={f"weight{fragment}": (50, 50)},
            ready_seconds=BACKWARD,
            computing_seconds=[codec, 0.0],
            engine_seconds=[0.0],
            fragment=fragment,
        )
        for fragment in range(fragments)
    ]
    return WorkloadProfile(
        recipe="", backward_seconds=BACKWARD, rest_seconds=REST, buckets=buckets, control_bytes=16, speeds=speeds
    )


def estimated(
    recipe: str, speeds: tuple[float, ...] = (), network: str = INSTANT, **options: object
) -> StepTimeEstimate:
    resolved = resolve(recipe, 4)
    measured = profile(speeds, resolved.strategy.steady_stage.schedule.fragments)
    return estimate_step_time(resolved, measured, read_network(network, 4), 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [INSTANT, SLOW])
@pytest.mark.parametrize(
    ("balanced", "plain"),
    [
        ("EveryStep(global_batch=64, batch=2, balance=True)", "EveryStep(accumulate=8)"),
        ("EveryStep(global_batch=64, batch=2, balance=True) + TopK(0.1)", "EveryStep(accumulate=8) + TopK(0.1)"),
        ("LocalSGD(8, balance=True)", "LocalSGD(8)"),
        ("DiLoCo(8, fragments=4, delay=1, balance=True)", "DiLoCo(8, fragments=4, delay=1)"),
    ],
)
def test_balance_at_equal_speeds_takes_as_long_as_without_it(balanced: str, plain: str, network: str) -> None:
    found = estimated(balanced, (1.0,) * 4, network)
    assert found.step_seconds == pytest.approx(estimated(plain, (), network).step_seconds, rel=1e-4)  # 8 bytes more
    assert found.step_seconds == estimated(balanced, (), network).step_seconds


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(4)", "EveryStep(accumulate=3)", "Gossip() + Ring()"])
def test_equal_speeds_scale_all_computing(recipe: str) -> None:
    assert estimated(recipe, (0.5,) * 4).step_seconds == pytest.approx(2 * estimated(recipe).step_seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "seconds"),
    [
        ("Dense()", 5 * (BACKWARD + REST)),
        ("EveryStep(accumulate=4)", 5 * (4 * BACKWARD + REST)),
        ("LocalSGD(4)", 5 * (BACKWARD + REST)),
        ("LocalSGD(4, per_site=2)", 5 * (BACKWARD + REST)),
        ("Gossip() + Ring()", 5 * (BACKWARD + REST)),
        ("EveryStep(delay=1)", 5 * (BACKWARD + REST)),
        # shares 10, 10, 10 and 2 of 32 passes; the slow worker also makes an optimizer step
        ("EveryStep(global_batch=64, batch=2, balance=True)", max(10 * BACKWARD + REST, 5 * (2 * BACKWARD + REST))),
        # 20, 20, 20 and 4 local steps, per step of the schedule
        ("LocalSGD(20, balance=True)", BACKWARD + REST),
        ("LocalSGD(16, balance=True)", BACKWARD + REST),  # 3 local steps of the slow worker, which waits
        ("LocalSGD(2, balance=True)", 5 * (BACKWARD + REST) / 2),  # one local step, for which the others wait
        # one pass of 10, 10, 10 and 2 of 32 samples, and of 8 in the profile
        ("EveryStep(global_batch=32, balance=True)", max(10 / 8 * BACKWARD + REST, 5 * (2 / 8 * BACKWARD + REST))),
        ("Silent()", (BACKWARD + REST) * 4 / sum(SPEEDS)),
    ],
)
def test_a_step_lasts_as_long_as_the_work_of_its_last_worker(recipe: str, seconds: float) -> None:
    resolved = resolve(recipe, 4)
    measured = replace(profile(SPEEDS), copies=0)
    if "per_site" in recipe:
        measured = replace(measured, site_buckets=measured.buckets, site_control_bytes=16)
    found = estimate_step_time(resolved, measured, read_network(INSTANT, 4), 4)
    assert found.step_seconds == pytest.approx(seconds, rel=2e-3)


def test_fragments_leave_when_the_slow_worker_is_at_their_position() -> None:
    """Its 3 steps of 8/3 end at positions 2, 5 and 8. The first fragment leaves at position 4: after its second step,
    at 16/3. The others then make the last 4 steps of the period."""
    found = estimated("DiLoCo(8, fragments=2, balance=True)", (1.0, 1.0, 1.0, 3 / 8))
    assert found.step_seconds == pytest.approx((16 / 3 + 4) / 8 * (BACKWARD + REST), rel=2e-3)


def test_given_shares_replace_those_of_the_speeds() -> None:
    recipe = "EveryStep(global_batch=64, batch=2, balance=True)"
    equal = estimated(recipe, SPEEDS, shares=(8, 8, 8, 8))
    assert equal.step_seconds == pytest.approx(5 * (8 * BACKWARD + REST), rel=2e-3)


def test_compression_on_a_slow_worker_takes_longer_too() -> None:
    recipe, network = resolve("Dense()", 4), read_network(INSTANT, 4)
    with_codec, without = (
        estimate_step_time(recipe, profile(SPEEDS, codec=codec), network, 4).step_seconds for codec in (0.1, 0.0)
    )
    assert with_codec - without == pytest.approx(5 * 0.1, rel=1e-3)


def test_unequal_hosts_and_speeds_are_simulated_together(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "net.toml"
    file.write_text('[[hosts]]\nrate = "10gbit"\ncount = 3\n[[hosts]]\nrate = "1gbit"\n')
    for recipe in ("Dense()", "Gossip() + Ring()", "LocalSGD(4)"):
        found = estimated(recipe, SPEEDS, str(file))
        assert found.step_seconds == pytest.approx(5 * (BACKWARD + REST), rel=0.01)


def test_unequal_workers_have_no_interval_because_past_ones_were_equal() -> None:
    assert estimated("Dense()", SPEEDS).interval is None
    assert estimated("Dense()", (1.0,) * 4).interval is not None


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(8, balance=True)", "Silent()", "EveryStep(delay=1)"])
def test_without_messages_and_compression_the_estimate_uses_what_the_strategy_uses(recipe: str) -> None:
    strategy = resolve(recipe, 4).strategy
    assert estimated(recipe, SPEEDS).speed_use == pytest.approx(speed_use(strategy, [1, 1, 1, 5]), rel=2e-3)


def test_speeds_survive_the_json_of_a_profile() -> None:
    assert tuple(WorkloadProfile.from_json(profile(SPEEDS).to_json()).speeds) == SPEEDS


#: Relative samples per second of docs/benchmarks/stragglers.md at speeds 1, 1, 1, 0.2. They include communication, and
#: the CPU quota slows it as well, so an estimate of computing alone is an upper bound.
MEASURED = {
    "Dense()": 0.16,
    "EveryStep(global_batch=256, batch=8, balance=True)": 0.71,
    "LocalSGD(period=20)": 0.19,
    "LocalSGD(period=20, balance=True)": 0.87,
    "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5, balance=True) + OneBit()": 0.87,
    "ParameterServer(mode='sync')": 0.17,
    "ParameterServer(mode='stale', staleness=4)": 0.16,
    "ParameterServer(mode='async')": 0.81,
    "AsyncDiLoCo(period=24)": 0.92,
    "Gossip(mixing='pairwise')": 0.75,
}


@pytest.mark.parametrize(("recipe", "measured"), MEASURED.items())
def test_the_use_of_speeds_is_an_upper_bound_of_measured_runs(recipe: str, measured: float) -> None:
    """The CPU quota gave the slow worker a speed of 0.167: 904 samples of 5381."""
    found = speed_use(resolve(recipe, 4).strategy, [1 / speed for speed in SPEEDS])
    assert measured <= found <= measured + 0.3

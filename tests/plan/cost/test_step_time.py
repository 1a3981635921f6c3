from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.cli.explain import explain
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.errors import GossamerError
from gossamer.plan.cost.step_time import StepTimeEstimate, estimate_step_time, plan
from gossamer.plan.cost.workload_profile import BucketProfile, OtherLoad, WorkloadProfile


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

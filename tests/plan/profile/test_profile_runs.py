import ast
import math
from dataclasses import replace

import pytest
import torch

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.plan.estimate.step_time import estimate_step_time, plan
from gossamer.plan.estimate.workload_profile import OtherLoad
from gossamer.plan.profile.profile_runs import (
    ProfileError,
    assume_profile,
    grown,
    profile_script,
    profile_with_gradients,
    received_bytes,
)
from gossamer.plan.profile.synthetic_shapes import assumed

SCRIPT = """
import sys, time, torch, gossamer
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(int(sys.argv[1])):
    try:
        model(torch.randn(8, 40)).mean().backward()
        time.sleep(0.005)
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        print("a script's own handlers do not keep it alive")
assert step < 10**6
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("copies", [1, 2])
def test_a_script_is_measured_until_it_has_shown_enough(script, copies):
    recipe = resolve("PowerSGD(rank=1)")
    seen = profile_script(script, [str(10**9)], recipe, workers=4, copies=copies)
    assert seen.recipe == repr(recipe)
    assert seen.copies == copies
    assert len(seen.timed_steps) == 6 * copies
    alone = replace(seen, other_load=OtherLoad())  # whatever else this machine does meanwhile
    assert estimate_step_time(recipe, alone, read_network("1gbit", 4), 4).caution is None
    slept = 0.005 / seen.other_load.slowdown  # what is taken out for others is taken out of the sleep, too
    assert slept < seen.rest_seconds < seen.compute_seconds
    assert seen.buffer_bytes == [120, 120, 8]
    assert seen.control_bytes > 0
    (bucket,) = seen.buckets
    assert sum(map(math.prod, bucket.shapes.values())) == 40 * 30 + 30 + 30 + 30 + 30 + 1
    assert 0 < bucket.ready_seconds <= seen.backward_seconds
    assert all(seconds > 0 for seconds in [*bucket.computing_seconds, *bucket.engine_seconds])
    assert len(plan(recipe, seen, 4)[0].rounds) == 2


LATE = """
import atexit, os, pathlib, sys, time
from torch.optim.optimizer import register_optimizer_step_pre_hook
folder, moments = pathlib.Path(sys.argv[2]), []
try:
    (folder / "first").touch(exist_ok=False)
except FileExistsError:
    time.sleep(1.0)  # long after the other copy could have made all its steps
register_optimizer_step_pre_hook(lambda *_: moments.append(time.monotonic()))
atexit.register(lambda: (folder / f"{os.getpid()}.moments").write_text(repr(moments)))
"""


@pytest.mark.measures
@pytest.mark.processes
def test_copies_of_a_short_script_make_their_steps_at_the_same_time(tmp_path):
    (tmp_path / "train.py").write_text(LATE + SCRIPT.replace("0.005", "0.02"))
    seen = profile_script(tmp_path / "train.py", ["20", str(tmp_path)], resolve("TopK(0.01)"), workers=2, copies=2)
    assert len(seen.timed_steps) >= 2
    one, other = (ast.literal_eval(path.read_text()) for path in tmp_path.glob("*.moments"))
    assert one[1] < other[-1]
    assert other[1] < one[-1]


@pytest.mark.processes
def test_a_script_of_few_steps_is_measured_by_those_and_reports_it(script):
    recipe = resolve("TopK(0.01)", 2)
    seen = profile_script(script, ["3"], recipe, workers=2)
    assert len(seen.timed_steps) in (1, 2)
    assert min(seen.timed_steps) > 0.005 / seen.other_load.slowdown
    assert seen.compute_seconds == pytest.approx(sum(seen.timed_steps) / len(seen.timed_steps))
    assert all(seconds > 0 for seconds in seen.buckets[0].computing_seconds)
    estimate = estimate_step_time(recipe, seen, read_network("1gbit", 2), 2)
    assert estimate.caution is not None
    assert estimate.caution.startswith(f"only {len(seen.timed_steps)} step")


@pytest.mark.processes
def test_a_script_without_a_step_that_could_be_timed_is_refused(script):
    with pytest.raises(ProfileError, match="at least 2 steps"):
        profile_script(script, ["1"], resolve("Dense"), workers=4)


@pytest.mark.processes
def test_a_script_that_fails_shows_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('by hand')")
    with pytest.raises(GossamerError, match=r"(?s)broken\.py failed.*ZeroDivisionError: by hand"):
        profile_script(tmp_path / "broken.py", [], resolve("Dense"), workers=4, copies=2)


@pytest.mark.parametrize("text", ["Int8", "OneBit", "QSGD(levels=7)", "TwoBit(adaptive=True)", "Sharded(TopK(0.01))"])
def test_every_part_can_be_decoded_where_one_worker_speaks_for_all(text):
    recipe = resolve(text, 3)
    model = assumed(100_003, recipe)
    (bucket,) = assume_profile(model, recipe, 0.3, workers=3).buckets
    assert "Sharded" in repr(recipe)
    assert len(bucket.engine_seconds) == 2


@pytest.fixture
def threads():
    """More than a worker of several is timed with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(("text", "rounds"), [("Dense", 1), ("TopK(0.01)", 1), ("PowerSGD(rank=2)", 2)])
def test_an_assumed_step_has_codecs_that_were_timed(text, rounds, threads):
    recipe = resolve(text)
    model = assumed(10_000_000, recipe)
    seen = assume_profile(model, recipe, 0.3, workers=3)
    assert seen.compute_seconds == 0.3
    assert torch.get_num_threads() == threads
    assert [len(bucket.engine_seconds) for bucket in seen.buckets] == [rounds] * len(model.layouts)
    moments = [bucket.ready_seconds for bucket in seen.buckets]
    assert moments == sorted(moments)
    assert moments[0] > 0.1
    assert moments[-1] == pytest.approx(0.3)
    assert [len(job.rounds) for job in plan(recipe, seen, 3)] == [rounds] * len(model.layouts)


def test_a_bucket_that_cannot_be_held_is_refused():
    recipe = resolve("Dense")
    model = assumed(10**12, recipe)
    with pytest.raises(ProfileError, match="too large to be compressed here"):
        assume_profile(model, recipe, 0.3, workers=3)


@pytest.mark.parametrize(
    ("text", "offers", "lands"),
    [
        ("LocalSGD(4) + TopK(0.01)", True, True),
        ("DiLoCo(8, fragments=3, delay=1) + Int8", True, True),
        ("DelayedAveraging(delay=2) + PowerSGD(2)", True, True),
        ("EveryStep(delay=1)", True, False),
        ("EveryStep(accumulate=2)", False, False),
    ],
)
def test_turns_are_timed_with_their_rules(text, offers, lands):
    recipe = resolve(text)
    model = assumed(400_003, recipe)
    seen = assume_profile(model, recipe, 0.3, workers=3)
    assert [bucket.fragment for bucket in seen.buckets] == list(model.fragments)
    assert [bucket.offering_seconds > 0 for bucket in seen.buckets] == [offers] * len(seen.buckets)
    assert [bucket.landing_seconds > 0 for bucket in seen.buckets] == [lands] * len(seen.buckets)
    assert estimate_step_time(recipe, seen, read_network("100mbit", 3), 3).step_seconds >= 0.3


def test_sites_are_timed_dense():
    recipe = resolve("LocalSGD(4, per_site=2) + TopK(0.01)")
    seen = assume_profile(assumed(400_003, recipe), recipe, 0.3, workers=4)
    assert [len(bucket.engine_seconds) for bucket in seen.site_buckets] == [1]
    assert [sorted(bucket.shapes) for bucket in seen.site_buckets] == [sorted(bucket.shapes) for bucket in seen.buckets]
    assert seen.site_control_bytes > seen.control_bytes > 0
    assert assume_profile(assumed(400_003, recipe), recipe, 0.3, workers=1).site_buckets == []


@pytest.mark.processes
@pytest.mark.parametrize("text", ["DiLoCo(4, fragments=2, optimizer_state='average')", "LocalSGD(3, per_site=2)"])
def test_a_script_that_merges_is_measured(script, text):
    recipe = resolve(text)
    seen = profile_script(script, [str(10**9)], recipe, workers=4)
    entries = 40 * 30 + 30 + 30 + 30 + 30 + 1
    assert sum(sum(map(math.prod, bucket.shapes.values())) for bucket in seen.buckets) == entries
    assert all(bucket.landing_seconds > 0 for bucket in seen.buckets)
    sites = "per_site" in text
    assert [bucket.fragment for bucket in seen.buckets] == ([0] if sites else [0, 1])
    assert list(seen.rider_bytes) == ([4 * 60 + 4] if sites else [4 * 60 + 4, 0])
    assert list(seen.buffer_bytes) == ([120, 120, 8] if sites else [])
    assert [bucket.ready_seconds > 0 for bucket in seen.site_buckets] == [True] * sites
    assert estimate_step_time(recipe, seen, read_network("1gbit", 4), 4).step_seconds >= seen.compute_seconds


@pytest.mark.processes
def test_a_script_that_sends_nothing_is_measured(script):
    recipe = resolve("Silent()", 4)
    seen = profile_script(script, ["300"], recipe, workers=4)
    assert len(seen.timed_steps) == 6
    assert (seen.buckets, seen.site_buckets) == ([], [])
    assert seen.backward_seconds > 0
    estimate = estimate_step_time(recipe, seen, read_network("1mbit,1s", 4), 4)
    assert estimate.step_seconds == pytest.approx(seen.compute_seconds)


@pytest.mark.processes
@pytest.mark.parametrize(("steps", "before", "batches", "copies"), [(10**9, 50, 5, 2), (53, 50, 2, 1), (3, 2, 1, 1)])
def test_gradients_are_looked_at_once_training_has_settled(script, steps, before, batches, copies):
    """A script that ends before tells of the batches that it had, of which the last is one."""
    profile, seen = profile_with_gradients(script, [str(steps)], workers=4, copies=copies, batches=5)
    assert profile.recipe == repr(resolve(None))
    assert seen is not None
    assert batches <= seen.batches <= 5
    assert before == seen.steps_before or copies > 1
    assert seen.entries == 40 * 30
    assert 0 < seen.largest_thousandth < seen.largest_hundredth < 1
    assert (seen.sign_agreement is None) == (seen.batches == 1)


@pytest.mark.processes
@pytest.mark.parametrize(("factor", "batches"), [("math.nan if step % 2 else 1", 2), ("math.inf", None)])
def test_gradients_that_are_not_finite_are_left_out_of_the_statistics(script, factor, batches):
    text = SCRIPT.replace(".mean().backward()", f".mean().mul({factor}).backward()")
    text = text.replace("optimizer.zero_grad()", "optimizer.zero_grad(); model.load_state_dict(first)")
    text = text.replace("session =", "first = copy.deepcopy(model.state_dict())\nsession =")
    script.write_text(f"import copy, math\n{text}")
    _, seen = profile_with_gradients(script, [str(10**9)], workers=4, batches=4)
    assert (seen and (seen.batches, seen.skipped_batches)) == (batches and (batches, batches))


@pytest.mark.processes
@pytest.mark.parametrize("batches", [0, 2])
def test_where_nobody_asks_no_gradients_are_looked_at(script, batches):
    _, seen = profile_with_gradients(script, [str(10**9)], workers=4, batches=batches)
    assert (seen is None) == (batches == 0)


# -- payload growth ----------------------------------------------------------------------------------------------------


def octets(count):
    return torch.empty(count, dtype=torch.uint8, device="meta")


def test_payloads_are_heard_one_by_one_and_means_added_up():
    gather, mean = AllGather((octets(10),)), AllReduceMean(octets(10))
    assert received_bytes(gather, 100) == 1000
    assert received_bytes(mean, 100) == 0
    assert received_bytes(AllToAll(((octets(3),),) * 100), 100) == 300
    assert received_bytes(Coalesced((gather, mean)), 100) == 1000


def timing(*seconds):
    return {"computing_seconds": list(seconds), "engine_seconds": [0.0]}


def check_linear(rule):
    """Decoding takes 2 seconds and 1 for each payload of 10 bytes: of 4, of 16, and so of 1,000."""
    found = rule(timing(5.0, 6.0), timing(5.0, 18.0), [[40], [160], [10_000]])
    assert found["computing_seconds"] == pytest.approx([5.0, 1002.0])


def test_decoding_grows_with_the_payloads():
    check_linear(grown)
    for broken in (lambda few, many, heard: many, lambda few, many, heard: grown(many, many, heard)):
        with pytest.raises(AssertionError):
            check_linear(broken)


def test_what_does_not_grow_stays():
    """As for a part of a reduce-scatter: more workers, each with less; noise makes nothing of it."""
    assert grown(timing(5.0, 6.0), timing(5.0, 7.0), [[100], [100], [100]]) == timing(5.0, 7.0)
    assert grown(timing(5.0, 7.0), timing(5.0, 6.0), [[40], [160], [1000]]) == timing(5.0, 6.0)

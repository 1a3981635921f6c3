import math

import pytest

from gossamer.errors import GossamerError
from gossamer.forecast import assumed
from gossamer.foretell import plan
from gossamer.measure import MeasureError, assume, measure
from gossamer.recipe import resolve

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
    seen = measure(script, [str(10**9)], recipe, workers=4, copies=copies)
    assert seen.recipe == repr(recipe)
    assert seen.copies == copies
    assert 0.005 < seen.rest_seconds < seen.compute_seconds
    assert seen.buffer_bytes == [120, 120, 8]
    assert seen.control_bytes > 0
    (bucket,) = seen.buckets
    assert sum(map(math.prod, bucket.shapes.values())) == 40 * 30 + 30 + 30 + 30 + 30 + 1
    assert 0 < bucket.ready_seconds <= seen.backward_seconds
    assert all(seconds > 0 for seconds in [*bucket.computing_seconds, *bucket.engine_seconds])
    assert len(plan(recipe, seen, 4)[0].rounds) == 2


@pytest.mark.processes
def test_a_script_that_ends_too_soon_is_refused(script):
    with pytest.raises(MeasureError, match="at least 12 steps"):
        measure(script, ["5"], resolve("Dense"), workers=4)


@pytest.mark.processes
def test_a_script_that_fails_shows_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('by hand')")
    with pytest.raises(GossamerError, match=r"(?s)broken\.py failed.*ZeroDivisionError: by hand"):
        measure(tmp_path / "broken.py", [], resolve("Dense"), workers=4, copies=2)


@pytest.mark.parametrize("text", ["Int8", "OneBit", "QSGD(levels=7)", "TwoBit(adaptive=True)", "Sharded(TopK(0.01))"])
def test_every_part_can_be_decoded_where_one_worker_speaks_for_all(text):
    recipe = resolve(text, 3)
    model = assumed(100_003, recipe)
    (bucket,) = assume(model, recipe.compressor, 0.3, workers=3).buckets
    assert "Sharded" in repr(recipe)
    assert len(bucket.engine_seconds) == 2


@pytest.mark.parametrize(("text", "rounds"), [("Dense", 1), ("TopK(0.01)", 1), ("PowerSGD(rank=2)", 2)])
def test_an_assumed_step_has_codecs_that_were_timed(text, rounds):
    recipe = resolve(text)
    model = assumed(10_000_000, recipe)
    seen = assume(model, recipe.compressor, 0.3, workers=3)
    assert seen.compute_seconds == 0.3
    assert [len(bucket.engine_seconds) for bucket in seen.buckets] == [rounds] * len(model.layouts)
    moments = [bucket.ready_seconds for bucket in seen.buckets]
    assert moments == sorted(moments)
    assert moments[0] > 0.1
    assert moments[-1] == pytest.approx(0.3)
    assert [len(job.rounds) for job in plan(recipe, seen, 3)] == [rounds] * len(model.layouts)


def test_a_bucket_that_cannot_be_held_is_refused():
    recipe = resolve("Dense")
    model = assumed(10**12, recipe)
    with pytest.raises(MeasureError, match="too large to be compressed here"):
        assume(model, recipe.compressor, 0.3, workers=3)

"""User scripts, run until they attach to see what they would send."""

import gc
import os
import sys
from pathlib import Path

import pytest
from support.expected_traffic import other, ring

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.kernels import coded_bytes
from gossamer.errors import AttachError
from gossamer.events import emit
from gossamer.plan.profile.user_script import attached_by
from gossamer.train.engine.step_decision import STANDING_BYTES, control_bytes
from gossamer.train.traffic.traffic import estimate_traffic

ATTACHES = """
import os, sys
from gossamer import events
from gossamer.base.layout import Layout
import neighbour
print("chatter")
size = int(sys.argv[sys.argv.index("--size") + 1])
try:
    events.emit(events.Attached(
        recipe=os.environ["GOSSAMER_RECIPE"], layouts=(("float32", Layout.of({"w": (size, size)})),),
        parameters=size * size, buffer_bytes=size, control_bytes=1, rank=0, world=1))
except Exception:
    pass
raise AssertionError("the script went on after it attached")
"""


def write(folder, text, name="train.py"):
    (folder / "neighbour.py").write_text("")
    (folder / name).write_text(text)
    return folder / name


def test_a_script_runs_until_it_attaches(tmp_path, capsys):
    before = sys.argv, sys.path, dict(os.environ), list(events._listeners)
    seen = attached_by(write(tmp_path, ATTACHES), ["--size", "30"], resolve("home"))
    assert seen.parameters == 900
    assert seen.recipe == repr(resolve("home"))
    assert (sys.argv, sys.path, dict(os.environ), events._listeners) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["x = 1", "raise SystemExit(2)"])
def test_a_script_that_never_attaches_is_refused(tmp_path, text):
    with pytest.raises(AttachError, match=r"train\.py ended before it called gossamer\.attach.*--parameters"):
        attached_by(write(tmp_path, text), [], resolve(None))


def test_the_text_of_sys_exit_is_shown(tmp_path):
    with pytest.raises(AttachError, match=r"ended by sys\.exit\('the data is missing'\) before it called"):
        attached_by(write(tmp_path, "raise SystemExit('the data is missing')"), [], resolve(None))


def test_the_working_directory_of_a_script_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path, "import os\nos.chdir('data')\n" + ATTACHES)
    assert attached_by(Path("train.py"), ["--size", "3"], resolve(None)).parameters == 9
    assert Path.cwd() == tmp_path


def test_other_events_do_not_stop_a_script(tmp_path):
    emits = "from gossamer import events\nevents.emit(events.Noticed(message='hello'))\n"
    script = write(tmp_path, emits + ATTACHES)
    assert attached_by(script, ["--size", "3"], resolve(None)).parameters == 9


def test_a_failing_script_shows_its_own_error_and_leaves_no_trace(tmp_path):
    before = sys.argv, dict(os.environ), list(events._listeners)
    with pytest.raises(ZeroDivisionError):
        attached_by(write(tmp_path, "1 / 0"), [], resolve(None))
    assert (sys.argv, dict(os.environ), events._listeners) == before
    emit(events.Noticed(message="nobody listens any more"))


def test_a_real_attach_is_priced(tmp_path):
    script = write(
        tmp_path,
        "import gossamer, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))\n"
        "gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 'Dense')\n"
        "raise AssertionError('the script went on after it attached')\n",
    )
    recipe = resolve("TopK(0.1)")
    seen = attached_by(script, [], recipe)
    assert seen.recipe == repr(recipe)
    said = estimate_traffic(recipe, seen, workers=2)
    assert [op.bytes_sent for ops in said.buckets for op in ops] == [
        120 * 4 + coded_bytes(120, 1200),
        ring(4 * 120, 2),
    ]
    assert other(said, "control") == control_bytes(4, 1) + STANDING_BYTES
    assert other(said, "buffers") == seen.buffer_bytes / 2 >= 4 * 80 / 2


def test_the_session_of_a_script_is_collected_at_once(tmp_path):
    """Otherwise a worker of a simulated job may collect it, and wait for its communication thread within a lock."""
    script = write(
        tmp_path,
        "import torch, gossamer\nmodel = torch.nn.Linear(2, 2)\n"
        "session = gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))\n",
    )
    sessions = [each for each in gc.get_objects() if type(each).__name__ == "Session"]
    gc.disable()
    try:
        attached_by(script, [], resolve("Dense()", 2))
        left = [each for each in gc.get_objects() if type(each).__name__ == "Session"]
    finally:
        gc.enable()
    assert len(left) == len(sessions)

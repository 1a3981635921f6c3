"""`gossamer run --workers MIN:MAX`, from its command to its record, with workers that only say that they train."""

from __future__ import annotations

import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer

pytestmark = pytest.mark.processes

TRAINING = """
import contextlib, os, signal, sys, time
from gossamer import events
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def train(first, last):
    events.emit(events.Attached(recipe="Dense()", layouts=(), parameters=10, buffer_bytes=0, control_bytes=0,
                                rank=rank, world=3))
    for step in range(first, last + 1):
        events.emit(events.StepEnded(step=step, seconds=0.1, bytes_sent=40))
        events.emit(events.Logged(step=step, values={"loss": 1 / step}))
def close(step, digest="same"):
    events.emit(events.Closed(steps=step, digest=digest, residual_bytes=1, bucket_bytes=2))
"""
COMES_BACK = """
if rank == 0:
    train(1, 20)
    open("trained", "w").close()
    wait_for("back"), wait_for("left")
elif rank == 2:
    train(1, 5)
    events.emit(events.LeftRun())
    open("left", "w").close()
    raise SystemExit(0)
elif not attempt:
    train(1, 10)
    events.emit(events.ResidualMeasured(step=8, norm=0.4142))
    wait_for("left")
    os.kill(os.getpid(), signal.SIGKILL)
else:
    train(11, 20)
    open("back", "w").close()
    wait_for("trained")
close(20)
"""
IS_PUT_OUT = """
train(1, 10)
with open(f"pid-{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid-{rank}", f"trained-{rank}")
if rank == 1:
    close(10, "of step 10")
    wait_for("trained-0"), wait_for("trained-2")
    raise RuntimeError("This worker is not in the run any more")
wait_for("trained-1")
with contextlib.suppress(ProcessLookupError):  # its launcher has seen its end
    while not os.kill(int(open("trained-1").read()), 0):
        time.sleep(0.01)
close(20, "of rank 2" if rank == 2 and os.path.exists("differs") else "same")
"""
IS_LOST = """
train(1, 10)
events.emit(events.Saved(step=10, directory="kept"))
open(f"saved-{rank}", "w").close()
if rank:
    wait_for("saved-0")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def run(directory: Path, script: str, *options: str) -> Result:
    (directory / "train.py").write_text(TRAINING + script)
    words = ["run", "--logs", "logs", *options, "train.py"]
    with chdir(directory), engine_files_left_open(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gossamer", *words])
        return CliRunner().invoke(gossamer, words)


def test_the_record_knows_who_came_back_and_who_left(tmp_path: Path) -> None:
    done = run(tmp_path, COMES_BACK, "--workers", "1:3", "--max-restarts", "1")
    assert done.exit_code == 0, done.output
    assert "rank 1 was lost (signal SIGKILL). The other " in done.output
    said = " ".join(done.output.split())
    assert "; restarting it (1 of at most 1). Its residual, of norm 0.414 after step 8, is lost with it." in said
    assert "of them left              rank 2" in done.output
    record = json.loads((tmp_path / "logs" / "record.json").read_text())
    assert (record["ended"], record["lost"], record["left"]) == ("finished", [], [2])
    assert record["lost_residuals"] == [{"rank": 1, "norm": 0.4142, "step": 8}]
    assert (record["steps"], record["resumed_at"], record["workers_agree"]) == (20, 0, True)
    assert [step for step, _, _ in record["metrics"]["loss"]] == list(range(1, 21))
    assert not (tmp_path / "logs" / "coordinator.json").exists()


@pytest.mark.parametrize("differs", [False, True])
def test_only_those_who_were_in_the_run_at_its_end_are_compared(tmp_path: Path, differs: bool) -> None:
    if differs:
        (tmp_path / "differs").touch()
    done = run(tmp_path, IS_PUT_OUT, "--workers", "1:3")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "logs" / "record.json").read_text())
    assert (record["lost"], record["workers_agree"]) == ([1], not differs)


def test_a_run_that_is_too_small_ends_with_75_and_explains_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "0.5")
    done = run(tmp_path, IS_LOST, "--workers", "2:4:2", "--grace-seconds", "5")
    assert done.exit_code == 75, done.output
    said = " ".join(done.output.split())
    assert "1 worker of at least 2 is left, so training waits for more workers, for 0.5 s at most" in said
    assert "gossamer run --join 127.0.0.1:" in said
    assert "1 worker of at least 2 was left, and no worker joined within 0.5 s." in said
    assert "A checkpoint of step 10 is in kept. A script that calls session.load('kept') continues from it" in said
    assert "gossamer run --logs logs --workers 2:4:2" in said
    assert json.loads((tmp_path / "logs" / "record.json").read_text())["ended"] == "interrupted"

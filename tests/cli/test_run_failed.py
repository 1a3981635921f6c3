"""What `gossamer run` leaves of a run that failed, or was killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.processes import all_end_soon, engine_files_left_open, watched

from gossamer.cli.main import gossamer
from gossamer.observe import record as records


def run(directory: Path, script: str, *options: str) -> Result:
    (directory / "train.py").write_text(script)
    with chdir(directory), engine_files_left_open():
        return CliRunner().invoke(gossamer, ["run", *options, "train.py"])


RAISES_AT_50 = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(1, 101):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    session.log(loss=float(step))
    if step == 50 and world.rank == 1:
        {}
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["raise ValueError('bad data')", "import os; os.kill(os.getpid(), 9)"])
def test_a_run_that_fails_midway_leaves_all_that_it_logged(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, RAISES_AT_50.format(end), "--json", "out.json", "--logs", "logs")
    assert done.exit_code != 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["ended"], record["lost"]) == ("failed", [])
    losses = [(step, loss) for step, _, loss in record["metrics"]["loss"]]
    assert losses[:50] == [(step, float(step)) for step in range(1, len(losses[:50]) + 1)]
    assert len(losses) >= (50 if "raise" in end else 9)  # a kill loses a second at most, and never the first ten steps
    assert json.loads((tmp_path / "logs" / "record.json").read_text()) == record


LOGGED = """
import os
from gossamer import events
rank = int(os.environ["RANK"])
events.emit(events.Attached(recipe="Dense()", layouts=(), parameters=10, buffer_bytes=0, control_bytes=0, rank=rank,
                            world=2))
events.emit(events.StepEnded(step=1, seconds=2.0, bytes_sent=40))
events.emit(events.Logged(step=1, values={"loss": 0.5}))
"""


@pytest.mark.processes
def test_where_the_record_cannot_be_written_what_was_logged_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, record: records.Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", full)
        done = run(tmp_path, LOGGED, "--logs", "logs")
    assert (done.exit_code, "steps                     1 in" in done.stdout) == (0, True)
    assert "No space left on device" in done.stderr
    assert "`gossamer record logs` makes the record of it" in " ".join(done.stderr.split())
    assert CliRunner().invoke(gossamer, ["record", str(tmp_path / "logs")]).exit_code == 0
    assert json.loads((tmp_path / "logs" / "record.json").read_text())["metrics"]["loss"][0][2] == 0.5
    done = run(tmp_path, LOGGED, "--logs", "again")
    assert sorted(os.listdir(tmp_path / "again")) == ["rank-0.log", "rank-1.log", "record.json", "run.sqlite"]


# One line of output once 30 slow steps are logged, and then no end
KILLED = """
import os, time
from gossamer import events
rank = int(os.environ["RANK"])
events.emit(events.Attached(moment=0.0, recipe="Dense()", layouts=(), parameters=10, buffer_bytes=0, control_bytes=0,
                            rank=rank, world=2))
for step in range(1, 31):
    events.emit(events.StepEnded(moment=2.0 * step, step=step, seconds=2.0, bytes_sent=40))
    events.emit(events.Logged(moment=2.0 * step, step=step, values={"loss": 1 / step}))
print("pid", os.getpid(), flush=True)
time.sleep(100)
"""


@watched
@pytest.mark.processes
def test_after_a_kill_of_everything_gossamer_record_has_what_was_logged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    command = [sys.executable, "-c", "from gossamer.cli.main import main; main()", "run", "--logs", "logs", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        workers = [os.pidfd_open(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
        launcher.kill()
        for worker in workers:
            with suppress(ProcessLookupError):  # its watcher has ended it
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        assert all_end_soon(workers)
    assert CliRunner().invoke(gossamer, ["record", str(tmp_path / "logs")]).exit_code == 0
    record = json.loads((tmp_path / "logs" / "record.json").read_text())
    assert (record["ended"], record["steps"], record["workers"]) == ("interrupted", 30, 2)
    assert record["metrics"]["loss"] == [[step, 2.0 * step, 1 / step] for step in range(1, 31)]

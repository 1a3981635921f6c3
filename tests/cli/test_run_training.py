"""Runs that end: records, failures, signals, logs, and tensors that stay there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, closing, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.processes import all_end_soon, engine_files_left_open, watched

from gossamer.base.run_files import RunFiles
from gossamer.cli import run_training
from gossamer.cli.main import gossamer
from gossamer.events import Event, Joined, WithoutSession
from gossamer.launcher.job import Job
from gossamer.launcher.startup import StageMarks
from gossamer.observe import record as records
from gossamer.observe.telemetry import open_store


class Terminal:
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("heard", "told"),
    [
        ([Joined()], "never called gossamer.attach"),
        ([Joined(), WithoutSession(trains=True)], "ran without a session"),
        ([Joined(), WithoutSession(trains=False)], "ran without a session"),
    ],
)
def test_a_script_that_needs_no_session_is_not_told_to_attach(heard: list[Event], told: str, tmp_path: Path) -> None:
    files, terminal = RunFiles(tmp_path), Terminal()
    for rank in range(2):
        files.report_start(rank, 0, 4711)
    for event in heard:
        StageMarks(files, 1, 0)(event)
    job = Job(script=Path("split.py"), workers=2, logs=tmp_path / "logs")
    run_training.report(job, tmp_path, records.NO_NETWORK, "finished", terminal, None, None)  # type: ignore[arg-type]
    (said,) = terminal.said
    assert told in said
    assert ("Add this line" in said) == (len(heard) == 1)


TRAINING = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    session.log(loss=loss.item())
"""


@pytest.mark.processes
def test_a_run_is_logged_where_tools_look_for_it(tmp_path: Path) -> None:
    places = ("--log-to", "jsonl:out/metrics.jsonl", "--log-to", "tensorboard:tb", "--log-to", "jsonl:train.py/x")
    (tmp_path / "train.py").write_text(TRAINING)
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", *places, "train.py"])
    assert done.exit_code == 0, done.output
    for rank, name in enumerate(("metrics.jsonl", "metrics-1.jsonl")):
        lines = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line["values"]] == [1, 2, 3]
        assert {line["rank"] for line in lines} == {rank}
    assert sorted(os.listdir(tmp_path / "tb")) == ["rank-0", "rank-1"]
    assert "train.py/x refuses this worker's metrics (File exists)" in " ".join(done.output.split())


SIGNALED = """
import os, signal, time
heard = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: heard.append(number))
    os.kill(os.getppid(), number)
    while number not in heard:
        time.sleep(0.01)
print("handled both", flush=True)
"""


@watched
@pytest.mark.processes
def test_usr1_and_usr2_to_the_launcher_reach_a_script_that_handles_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIGNALED)
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "1", "train.py"])
    assert done.exit_code == 0, done.output
    assert "handled both" in done.stdout
    assert "SIGUSR2 was forwarded to rank 0" in done.stderr


PREEMPTED = """
import gossamer, pathlib, torch
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
try:
    while True:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if session.steps == 3:
            pathlib.Path("notice").write_text("maintenance at noon")
except KeyboardInterrupt:
    session.save("checkpoints")
"""


@watched
@pytest.mark.processes
def test_a_preemption_notice_stops_the_run_in_time_to_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PREEMPTED)
    arguments = ["run", "--workers", "1", "--logs", "logs", "--preemption-notice", "cat notice", "train.py"]
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, arguments)
    assert done.exit_code == 128 + signal.SIGINT, done.output
    assert list((tmp_path / "checkpoints").iterdir())
    record = json.loads((tmp_path / "logs" / "record.json").read_text())
    assert record["ended"] == "interrupted"
    assert "maintenance at noon" in record["preempted"]
    assert "maintenance at noon" in done.stderr


def test_without_the_option_no_source_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_training, "notices_of", lambda text: pytest.fail("asked"))
    with run_training.preemption_watch(None, print) as watch:
        assert watch is None


THREE_STEPS = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer):
    for step in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.processes
def test_the_store_says_what_every_tensor_costs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(THREE_STEPS)
    with chdir(tmp_path), engine_files_left_open():
        command = ["run", "--workers", "2", "--recipe", "TopK(density=0.25)", "--logs", "logs", "train.py"]
        done = CliRunner().invoke(gossamer, command)
    assert done.exit_code == 0, done.output
    asked = "SELECT name, rank, numel, bytes > 0, gradient_norm > 0, energy_share > 0.25, energy_share < 1 FROM tensor"
    with closing(open_store(tmp_path / "logs" / "run.sqlite", readonly=True)) as db:
        told = {tuple(row) for row in db.execute(asked)}
    assert {("weight", rank, 4096, 1, 1, 1, 1) for rank in range(2)} <= told
    assert {name for name, *_ in told} == {"weight", "bias"}


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
    assert "`gossamer record logs` makes the record from them" in " ".join(done.stderr.split())
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

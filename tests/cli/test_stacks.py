"""`gossamer stacks`: one rank is stuck in its loop, and the dump of all names its line."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command_line import refusal
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer

STUCK = """
import glob, os, time
from gossamer import events
rank, folder = int(os.environ["RANK"]), os.environ["GOSSAMER_RUN_DIRECTORY"]

def load_a_batch():
    open("stuck", "w").close()
    while not os.path.exists("named"):
        time.sleep(0.01)  # the line where it is stuck, until it has been named

def names_it():
    return any("load_a_batch" in open(path).read() for path in glob.glob(f"{folder}/stacks-1-*.txt"))

if rank == 1:
    load_a_batch()
else:
    while not os.path.exists("stuck"):
        time.sleep(0.01)
    while not names_it():
        events.emit(events.Stalled(rank=0, seconds=60.0, waits_for=(1,)))  # as after a minute
        time.sleep(0.01)
    open("named", "w").close()
"""


@pytest.mark.processes
def test_a_worker_that_is_stuck_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--logs", "logs", "train.py"])
        assert done.exit_code == 0, done.output
        shown = CliRunner().invoke(gossamer, ["stacks", "logs"])
    assert shown.exit_code == 0, shown.output
    first = STUCK.splitlines().index("def load_a_batch():") + 2
    assert any(f"rank 1: at train.py:{at} in load_a_batch\n" in shown.output for at in range(first, first + 3))
    assert "\nrank 0: " in shown.output
    assert "wrote the Python stacks of its workers" in " ".join(done.output.split())
    assert "in load_a_batch" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_run_that_was_never_asked_explains_how_to_ask(tmp_path: Path) -> None:
    said = refusal("stacks", str(tmp_path))
    assert "kill -USR1 PID" in said

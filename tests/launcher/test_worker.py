"""The program of a worker: the script's end."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from pathlib import Path

import pytest
import torch

from gossamer.base.run_files import RunFiles, read_json
from gossamer.comm.runtime import open_sessions
from gossamer.launcher import worker
from gossamer.launcher.failure import from_report

SCRIPT = """
import gc, sys
from gossamer.errors import Stopped
from gossamer.comm.runtime import open_sessions

class Session:
    def close(self):
        open_sessions.unregister(self)
        print("closed")

def work():
    session = Session()
    open_sessions.register(session)
    {}

session = Session()
open_sessions.register(session)
gc.collect()
{}
"""


@pytest.mark.parametrize(
    ("within", "after", "closed"),
    [
        ("return", "work()", 1),
        ("raise Stopped", "work()", 2),
        ("sys.exit()", "work()", 2),
        ("sys.exit(3)", "work()", 0),
    ],
)
def test_sessions_that_the_script_left_open_are_closed_at_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    within: str,
    after: str,
    closed: int,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(within, after))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    close = worker._close_sessions
    monkeypatch.setattr(worker, "_close_sessions", lambda: (gc.collect(), close()))  # garbage is gone by then
    reporter = worker.FailureReporter(RunFiles(tmp_path), 0)
    worker._run([str(script)], reporter)
    assert capsys.readouterr().out.split() == ["closed"] * closed
    for session in open_sessions.open_sessions():
        open_sessions.unregister(session)


@pytest.mark.parametrize(("code", "ending"), [(-1, 255), (7, 7), (300, 44), (True, 1), ("no data", 1)])
def test_the_launcher_receives_the_exit_code_that_the_system_reports(tmp_path: Path, code: object, ending: int) -> None:
    assert worker.FailureReporter(RunFiles(tmp_path), 0).ended(code) == ending
    report = read_json(RunFiles(tmp_path).failure(0, 0))
    assert report is not None
    failure = from_report(report)
    assert (failure.shell_code, failure.ending) == (ending, f"exit code {ending}")


def test_the_summary_of_an_error_is_its_message_and_not_a_note(tmp_path: Path) -> None:
    error = ValueError("the dataset is empty")
    error.add_note("while reading\nshard 3")
    worker.FailureReporter(RunFiles(tmp_path), 0).raised(error)
    report = read_json(RunFiles(tmp_path).failure(0, 0))
    assert report is not None
    assert report["summary"] == "ValueError: the dataset is empty"
    assert report["traceback"].endswith("ValueError: the dataset is empty\nwhile reading\nshard 3\n")


def test_an_exit_code_that_the_system_cuts_to_zero_is_a_success(tmp_path: Path) -> None:
    assert worker.FailureReporter(RunFiles(tmp_path), 0).ended(256) == 0
    assert not RunFiles(tmp_path).failure(0, 0).exists()


def test_an_error_that_a_full_disk_keeps_from_the_launcher_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker, "write_json", full)
    assert worker.FailureReporter(RunFiles(tmp_path), 0).raised(ValueError("bad data")) == 1
    said = capsys.readouterr().err
    assert "ValueError: bad data" in said
    assert "no report of this error ([Errno 28] No space left on device)" in said


@pytest.mark.parametrize(("orders", "has_place"), [('{"RANK": "3"}\n', True), ("", False)])
def test_a_standby_becomes_the_worker_whose_place_it_is_given(
    orders: str, has_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, ready = ["worker", "--standby", "train.py"], list[bool]()
    monkeypatch.setenv("RANK", "none")
    monkeypatch.setattr(worker, "warm_up", lambda: ready.append(True))
    monkeypatch.setattr(sys, "stdin", io.StringIO(orders))
    monkeypatch.setattr(sys, "argv", arguments)  # another list than at the import, as in a fork
    assert worker.wait_for_place() is has_place
    assert (arguments, ready) == (["worker", "train.py"], [True])
    assert os.environ["RANK"] == ("3" if has_place else "none")


def test_a_worker_that_is_no_standby_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["worker", "train.py", "--standby"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert worker.wait_for_place()
    assert arguments == ["worker", "train.py", "--standby"]


def test_warming_up_looks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no fork of this process could use it."""
    for module, name in ((torch.accelerator, "current_accelerator"), (torch.cuda, "is_available")):
        monkeypatch.setattr(module, name, lambda *given, **options: pytest.fail("a GPU was looked for"))
    worker.warm_up()
    with pytest.raises(pytest.fail.Exception):
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


def test_warming_up_draws_no_number() -> None:
    before = torch.get_rng_state()
    worker.warm_up()
    assert torch.equal(torch.get_rng_state(), before)

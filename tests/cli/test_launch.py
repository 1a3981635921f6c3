"""gossamer.launch: results by rank, errors with their traceback, and interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import chdir
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import SOON_SECONDS, all_end_soon, of_this_checkout, watched

import gossamer
from gossamer.base.run_files import RUN_DIRECTORY
from gossamer.cli import launch as launching
from gossamer.errors import GossamerError, RecipeError

SCRIPT = """
import dataclasses
import torch
import gossamer

@dataclasses.dataclass
class Answer:
    value: int
    notes: list = dataclasses.field(default_factory=list)

offset = 40

def train(rate):
    world = gossamer.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with gossamer.attach(model, optimizer) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=1.0)
    print("worker", world.rank)
    assert dataclasses.fields(Answer)[0].default is dataclasses.MISSING
    return Answer(offset + world.rank), model.weight.detach()

def fail():
    if gossamer.init().is_first:
        raise LookupError("no such batch")

results = gossamer.launch(train, 0.1, workers=2, recipe=gossamer.Int8(), logs="logs")
assert [type(answer) is Answer and answer.value for answer, _ in results] == [40, 41]
assert torch.equal(results[0][1], results[1][1])
try:
    gossamer.launch(fail, workers=1, logs="failed")
except gossamer.errors.WorkerFailed as error:
    assert error.rank == 0
    print(error)
"""

LOCK = threading.Lock()


@pytest.mark.processes
def test_functions_of_a_script_return_results_by_rank_or_raise_their_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=of_this_checkout(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"[rank 0] worker 0", "[rank 1] worker 1"} <= set(done.stdout.splitlines())
    told = done.stdout[done.stdout.index("rank 0 failed") :]
    assert 'raise LookupError("no such batch")' in told  # the line of the script
    assert "rank-0.log" in told
    record = gossamer.Record.load(tmp_path / "logs")
    assert "Int8()" in record["recipe"]
    assert record["steps"] == 3


WAITING = """
import os, time
import gossamer
def wait():
    print("pid", os.getpid())
    time.sleep(600)
try:
    gossamer.launch(wait, workers=2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.processes
@watched
def test_ctrl_c_ends_all_workers_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, "-u", "train.py"],
        cwd=tmp_path, env=of_this_checkout(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        opened = [os.pidfd_open(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
        try:
            launcher.send_signal(signal.SIGINT)
            assert all_end_soon(opened)
            said, _ = launcher.communicate(timeout=SOON_SECONDS)
        finally:
            launcher.kill()
    assert "interrupted" in said
    assert launcher.returncode == 0


@pytest.mark.parametrize(
    ("function", "options", "error", "word"),
    [
        (3, {}, TypeError, "function, got int"),
        (print, {"workers": 0}, ValueError, "at least 1"),
        (print, {"workers": 2.0}, TypeError, "integer"),
        (print, {"recipe": "TopK(2)"}, RecipeError, "density"),
        (print, {"network": "1furlong"}, (GossamerError, ValueError), "furlong"),
        (partial(print, LOCK), {}, TypeError, "inside the function"),
    ],
)
def test_invalid_arguments_are_refused_before_a_worker_starts(
    function: Any, options: dict[str, Any], error: type[Exception], word: str, tmp_path: Path
) -> None:
    with chdir(tmp_path), pytest.raises(error, match=word):
        gossamer.launch(function, **options)


def test_a_worker_cannot_launch_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, "somewhere")
    with pytest.raises(GossamerError, match="workers run already"):
        gossamer.launch(print)


def test_a_thread_cannot_launch_workers() -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            gossamer.launch(print)
        except GossamerError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_the_line_to_install_cloudpickle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r"pip install .*notebook"):
        gossamer.launch(print)


def test_a_result_that_cannot_be_returned_is_an_error_of_the_worker(tmp_path: Path) -> None:
    launching._store_call(tmp_path, threading.Lock, ())
    with pytest.raises(TypeError, match="state_dict"):
        launching.call(tmp_path, {"RANK": "0"})
    assert launching._result(tmp_path, 0) is None


def test_the_progress_replaces_one_line_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launching._cell_status() is None
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    display = SimpleNamespace(HTML=str, display=lambda text, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", shell)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    status = launching._cell_status()
    assert status is not None
    for text in ("step <1>", "step <1>"):
        status(text)
    assert shown == ["<pre>step &lt;1&gt;</pre>"]

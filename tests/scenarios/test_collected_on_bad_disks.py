"""A run whose disk is full for a while, or whose folder is removed: it trains on, says so, and catches up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.disks import mounted, needs_root
from support.processes import eventually, of_this_checkout

from gossamer.observe.telemetry import open_store

pytestmark = pytest.mark.processes

START_SECONDS = 90.0
SCRIPT = """
import pathlib, sys, time, torch, gossamer
world = gossamer.init()
folder = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossamer.attach(model, optimizer) as session:
    for step in range(100_000):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=float(loss.detach()))
        print("line", step, "x" * 500)
        time.sleep(0.005)
        (folder / f"step-{world.rank}").write_text(str(step))
        if world.is_first and (folder / "end").exists():
            session.request_stop()
        if session.should_stop:
            break
"""


@contextmanager
def training(folder: Path, logs: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--logs", str(logs), "train.py", str(folder)]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=of_this_checkout(), stdout=said, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def step(folder: Path, rank: int = 0) -> int:
    try:
        return int((folder / f"step-{rank}").read_text())
    except (OSError, ValueError):
        return -1


def trains_on(folder: Path, steps: int = 20, seconds: float = 20.0) -> bool:
    begun = step(folder)
    return eventually(lambda: step(folder) >= begun + steps, seconds)


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def check_all_is_there(logs: Path, made: int) -> None:
    """Every one of the steps of both ranks, once: as a step, as what it logged, and as the line that it said."""
    with closing(open_store(logs / "run.sqlite", readonly=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        for rank in range(2):
            assert db.execute("SELECT SUM(steps) FROM step WHERE rank = ?", (rank,)).fetchone()[0] == made
            assert db.execute("SELECT COUNT(*) FROM metric WHERE rank = ?", (rank,)).fetchone()[0] == made
            lines = "SELECT COUNT(*) FROM log WHERE rank = ? AND text LIKE 'line %'"
            assert db.execute(lines, (rank,)).fetchone()[0] == made
            assert (logs / f"rank-{rank}.log").read_text().count(" line ") == made


@needs_root
@pytest.mark.namespaces
def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    with mounted(tmp_path, megabytes=8) as disk, training(tmp_path, disk.folder / "logs") as launcher:
        assert trains_on(tmp_path, seconds=START_SECONDS), said(tmp_path)
        filler = disk.fill()
        assert eventually(lambda: "run.sqlite cannot be written" in said(tmp_path)), said(tmp_path)
        assert trains_on(tmp_path)
        filler.unlink()
        assert trains_on(tmp_path)
        (tmp_path / "end").touch()
        assert launcher.wait(100) == 0, said(tmp_path)
        assert said(tmp_path).count("run.sqlite cannot be written") == 1
        made = step(tmp_path) + 1
        assert step(tmp_path, 1) + 1 == made
        check_all_is_there(disk.folder / "logs", made)
        with pytest.raises(AssertionError):  # the broken twin: a step that was lost
            check_all_is_there(disk.folder / "logs", made + 1)


def test_a_folder_that_is_removed_while_the_run_continues(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with training(tmp_path, logs) as launcher:
        assert trains_on(tmp_path, seconds=START_SECONDS), said(tmp_path)
        shutil.rmtree(logs, ignore_errors=True)
        assert trains_on(tmp_path, 100)
        (tmp_path / "end").touch()
        assert launcher.wait(100) == 0, said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert f"{logs} was removed during the run" in " ".join(said(tmp_path).split())

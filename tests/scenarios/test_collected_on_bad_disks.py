"""A run whose disk is full for a while, or whose folder is removed: it trains on, says so, and catches up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.disks import mounted, needs_root
from support.paths import ROOT
from support.processes import eventually

from gossamer.telemetry import open_store

pytestmark = pytest.mark.processes

SCRIPT = """
import pathlib, sys, time, torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
last = 100_000
with gossamer.attach(model, optimizer) as session:
    for step in range(last):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=float(loss.detach()))
        print("line", step, "x" * 500)
        time.sleep(0.005)
        pathlib.Path(sys.argv[1], f"step-{world.rank}").write_text(str(step))
        if step % 100 == 99 and pathlib.Path(sys.argv[1], "end").exists():
            last = last if last < 100_000 else step + 200
        if step >= last:
            break
"""


@contextmanager
def training(folder: Path, logs: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--logs", str(logs), "train.py", str(folder)]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def step(folder: Path) -> int:
    try:
        return int((folder / "step-0").read_text())
    except (OSError, ValueError):
        return -1


def trains_on(folder: Path, steps: int, seconds: float = 30.0) -> bool:
    begun = step(folder)
    return eventually(lambda: step(folder) >= begun + steps, seconds)


@needs_root
@pytest.mark.namespaces
def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    with mounted(tmp_path, megabytes=8) as disk, training(tmp_path, disk.folder / "logs") as launcher:
        assert trains_on(tmp_path, 50, 120)
        filler = disk.fill()
        assert trains_on(tmp_path, 300)
        assert "takes nothing now" in (tmp_path / "said").read_text()
        filler.unlink()
        assert trains_on(tmp_path, 100)
        (tmp_path / "end").touch()
        launcher.wait(120)
        said = (tmp_path / "said").read_text()
        assert launcher.returncode == 0, said
        assert said.count("run.sqlite takes nothing now") == 1
        made = step(tmp_path) + 1
        db = open_store(disk.folder / "logs" / "run.sqlite", readonly=True)
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        for rank in range(2):
            assert db.execute("SELECT SUM(steps) FROM step WHERE rank = ?", (rank,)).fetchone()[0] == made
            assert db.execute("SELECT COUNT(*) FROM metric WHERE rank = ?", (rank,)).fetchone()[0] == made
            lines = "SELECT COUNT(*) FROM log WHERE rank = ? AND text LIKE 'line %'"
            assert db.execute(lines, (rank,)).fetchone()[0] == made
            assert (disk.folder / "logs" / f"rank-{rank}.log").read_text().count(" line ") == made
        db.close()


def test_a_folder_that_is_removed_while_the_run_goes_on(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with training(tmp_path, logs) as launcher:
        assert trains_on(tmp_path, 50, 120)
        shutil.rmtree(logs, ignore_errors=True)
        assert trains_on(tmp_path, 200)
        (tmp_path / "end").touch()
        launcher.wait(120)
    assert "Traceback" not in (tmp_path / "said").read_text()

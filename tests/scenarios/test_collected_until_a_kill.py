"""SIGKILL of a real launcher, a worker and a page's process, at random rows: the store opens, and lacks a second.

The truth are the ranks' event logs: once the store lags them by less than a second, a kill takes nothing of that away;
and all of it is there once somebody reads on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import all_end_soon, eventually, of_this_checkout, watched

from gossamer.errors import StoreError
from gossamer.observe.event_log import read_entries
from gossamer.observe.telemetry import Ingest, open_store

pytestmark = [pytest.mark.processes, watched]

SCRIPT = """
import time, torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossamer.attach(model, optimizer) as session:
    for step in range(100_000):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=float(loss.detach()))
        time.sleep(0.005)
"""
Told = dict[tuple[Any, ...], float]  # moment of a row by (rank, step), or (rank, step, metric)


@contextmanager
def gossamer(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gossamer", *arguments],
        cwd=folder,
        env=of_this_checkout(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(SCRIPT)
    with gossamer(folder, "run", "--workers", "2", "--logs", "logs", "train.py") as launcher:
        yield launcher


def event_logs(logs: Path) -> list[Path]:
    return sorted(logs.glob(".run-*/events-*.jsonl"))


def told(logs: Path) -> Told:
    """What the event logs hold, with the moment at which it was written: no earlier than it happened."""
    found: Told = {}
    for path in event_logs(logs):
        rank, began = int(path.stem.removeprefix("events-")), 0.0
        for entry in read_entries(path):
            if entry["kind"] == "attached":
                began = entry["moment"] - entry["at"]
            elif entry["kind"] == "steps":
                found[rank, entry["step"]] = began + entry["at"]
            elif entry["kind"] == "logged":
                found |= {(rank, step, name): began + entry["at"] for step, _, row in entry["points"] for name in row}
    return found


def kept(logs: Path) -> set[tuple[Any, ...]]:
    with closing(open_store(logs / "run.sqlite", readonly=True)) as db:
        found = {tuple(row) for row in db.execute("SELECT rank, step FROM step")}
        return found | {tuple(row) for row in db.execute("SELECT rank, step, name FROM metric")}


def check_whole(logs: Path) -> None:
    with closing(open_store(logs / "run.sqlite", readonly=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def pid_of(logs: Path, rank: int) -> int:
    (report,) = logs.glob(f".run-*/started-0-{rank}.json")
    return int(json.loads(report.read_text())["pid"])


def lacking(logs: Path, all_told: Told, until: float) -> set[tuple[Any, ...]]:
    return {row for row, moment in all_told.items() if moment <= until} - kept(logs)


def kept_up(logs: Path, rows: int) -> float:
    """The moment of a look that found so many rows told, and the store no more than a second behind; 0 for neither."""
    moment, all_told = time.time(), told(logs)
    try:
        return moment if len(all_told) >= rows and not lacking(logs, all_told, moment - 1.0) else 0.0
    except StoreError:  # not there, or just being made
        return 0.0


def test_a_launcher_that_is_killed(tmp_path: Path) -> None:
    logs, rows, looks = tmp_path / "logs", random.Random(3).randrange(50, 500), list[float]()
    with training(tmp_path) as launcher:
        assert eventually(lambda: looks.append(kept_up(logs, rows)) or looks[-1] > 0, 90), launcher.poll()
        workers = [os.pidfd_open(pid_of(logs, rank)) for rank in range(2)]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        assert all_end_soon(workers)  # those who watch the launcher end them
    everything = told(logs)
    check_whole(logs)
    assert lacking(logs, everything, looks[-1] - 1.0) == set()
    Ingest(logs).finish()
    check_whole(logs)
    assert kept(logs) == everything.keys()
    os.truncate(event_logs(logs)[0], 0)  # the broken twin: the truth is what the files hold
    assert kept(logs) != told(logs).keys()


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with training(tmp_path) as launcher:
        rows = random.Random(7).randrange(50, 500)
        assert eventually(lambda: len(told(logs)) >= rows, 90), launcher.poll()
        os.kill(pid_of(logs, 1), signal.SIGKILL)
        everything = told(logs)
        said, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 137, said
    check_whole(logs)
    assert everything.keys() - kept(logs) == set()
    db = open_store(logs / "run.sqlite", readonly=True)
    failures = {row["rank"]: (row["kind"], row["caused_by"]) for row in db.execute("SELECT * FROM failure")}
    db.close()
    assert failures[1] == ("killed", None)
    assert failures.get(0, ("echo", 1)) in {("echo", 1), ("stopped", 1)}, "it heard of it, or was stopped first"


def test_a_page_that_reads_a_run_without_a_launcher_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    draws, numbers = random.Random(11), 0
    (tmp_path / "events-0.jsonl").touch()
    with (tmp_path / "aside-0.jsonl").open("a", buffering=1) as file:
        for _ in range(2):
            with gossamer(tmp_path, "watch", str(tmp_path)) as page:
                assert page.stdout is not None
                page.stdout.readline()  # its link: it is about to look
                for _ in range(draws.randrange(1_000, 20_000)):
                    file.write(json.dumps({"kind": "noticed", "moment": 1.0, "number": numbers}) + "\n")
                    numbers += 1
                assert eventually(lambda: (tmp_path / "run.sqlite").exists())
                page.send_signal(signal.SIGKILL)
                page.wait()
    Ingest(tmp_path).finish()
    db = open_store(tmp_path / "run.sqlite", readonly=True)
    found = [json.loads(row["content"])["number"] for row in db.execute("SELECT content FROM event ORDER BY id")]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    assert found == list(range(numbers))

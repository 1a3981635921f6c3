"""Two launchers of one run, each as if on a machine of its own: the first one's store has what both tell."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import eventually, free_port, of_this_checkout

from gossamer.errors import StoreError
from gossamer.observe.telemetry import open_store

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, time, pathlib, torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("I am rank", world.rank, flush=True)
with gossamer.attach(model, optimizer) as session:
    for step in range(100_000):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=float(loss.detach()))
        if world.rank == 1 and pathlib.Path(sys.argv[1]).exists():
            raise ArithmeticError("of the second machine")
        time.sleep(0.01)
"""


@contextmanager
def two_launchers(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Each in a folder of its own, with one worker."""
    endpoint = f"127.0.0.1:{free_port()}"
    running = []
    try:
        for node in range(2):
            place = folder / str(node)
            place.mkdir()
            (place / "train.py").write_text(SCRIPT)
            command = [sys.executable, "-m", "gossamer", "run", "--workers", "1", "--nnodes", "2"]
            command += ["--node-rank", str(node), "--rendezvous", endpoint, "--logs", "logs"]
            running.append(
                subprocess.Popen(
                    [*command, "train.py", str(folder / "fail")],
                    cwd=place,
                    env=of_this_checkout() | {"GOSSAMER_TIMEOUT": "60"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield running
    finally:
        for each in running:
            each.kill()
            each.communicate()


@contextmanager
def store_of(folder: Path, node: int) -> Iterator[sqlite3.Connection]:
    db = open_store(folder / str(node) / "logs" / "run.sqlite", readonly=True)
    try:
        yield db
    finally:
        db.close()


def count(folder: Path, question: str, node: int = 0) -> int:
    try:
        with store_of(folder, node) as db:
            return int(db.execute(question).fetchone()[0])
    except StoreError:  # not there, or just being made
        return 0


def steps(folder: Path, rank: int) -> int:
    return count(folder, f"SELECT COALESCE(MAX(step), 0) FROM step WHERE rank = {rank}")


def check_the_first_has_all_of(rank: int, first: sqlite3.Connection, second: sqlite3.Connection) -> None:
    for table, columns in (("step", "step, steps, seconds"), ("metric", "name, step, value")):
        question = f"SELECT {columns} FROM {table} WHERE rank = {rank} ORDER BY step"
        rows = [tuple(row) for row in first.execute(question)]
        assert rows == [tuple(row) for row in second.execute(question)] != []


def test_the_first_store_has_both_machines_and_the_failure_on_the_second(tmp_path: Path) -> None:
    with two_launchers(tmp_path) as running:
        assert eventually(lambda: min(steps(tmp_path, 0), steps(tmp_path, 1)) > 20, 90), running
        assert eventually(lambda: count(tmp_path, "SELECT COUNT(*) FROM vital WHERE rank = 1") > 0)
        (tmp_path / "fail").touch()
        said = [each.communicate(timeout=200)[0] for each in running]
    assert all(each.returncode for each in running), said
    with store_of(tmp_path, 0) as first, store_of(tmp_path, 1) as second:
        for db in (first, second):
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        check_the_first_has_all_of(1, first, second)
        with pytest.raises(AssertionError):  # the broken twin: rows that do not come across
            check_the_first_has_all_of(0, first, second)
        told = "SELECT rank, text FROM log WHERE text LIKE 'I am rank%' ORDER BY rank"
        assert [tuple(row) for row in first.execute(told)] == [(0, "I am rank 0"), (1, "I am rank 1")]
        assert [tuple(row) for row in second.execute(told)] == [(1, "I am rank 1")]
        mine, other = first.execute("SELECT state, clock_offset, clock_error FROM rank ORDER BY rank").fetchall()
        assert other["state"] == "failed"
        assert mine["clock_offset"] is None
        assert abs(other["clock_offset"]) <= other["clock_error"]  # both are this machine's clock
        found = {row["rank"]: row for row in first.execute("SELECT * FROM failure")}
    assert "ArithmeticError" in found[1]["traceback"]
    assert found[1]["caused_by"] is None


def test_the_first_launcher_continues_when_the_second_is_killed(tmp_path: Path) -> None:
    """Training ends with the worker that the kill takes along; the store and what it had do not."""
    with two_launchers(tmp_path) as running:
        assert eventually(lambda: steps(tmp_path, 1) > 20, 90), running
        had = steps(tmp_path, 1)
        os.kill(running[1].pid, signal.SIGKILL)
        said, _ = running[0].communicate(timeout=200)
    assert running[0].returncode == 1, said
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>' not in said
    assert steps(tmp_path, 1) >= had
    for node in range(2):
        assert count(tmp_path, "SELECT COUNT(*) FROM step", node) > 0
        with store_of(tmp_path, node) as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    with store_of(tmp_path, 0) as db:
        assert db.execute("SELECT value FROM run WHERE key = 'how'").fetchone()[0] == '"failed"'

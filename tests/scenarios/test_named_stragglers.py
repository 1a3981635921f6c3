"""A straggler of a real run is named in its store, with its cause, once it is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.processes import eventually, of_this_checkout

from gossamer.errors import StoreError
from gossamer.observe.telemetry import open_store

SLOW, HEALTHY_STEPS = "data loading", 20
SCRIPT = """
import sys, time
from pathlib import Path
import torch, gossamer

DEVICE_SECONDS, DATA_SECONDS = 0.02, 0.06

torch.set_num_threads(1)
world, folder = gossamer.init(), Path(sys.argv[1])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with gossamer.attach(model, optimizer, "Dense()") as session:
    while not session.should_stop:
        if world.rank == 1 and (folder / "slow").exists():
            time.sleep(DATA_SECONDS)
        loss = model(torch.randn(4, 8)).square().mean()
        time.sleep(DEVICE_SECONDS)  # what an accelerator would take
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.is_first and (folder / "end").exists():
            session.request_stop()
"""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--logs", "logs", "train.py", str(folder)]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, env=of_this_checkout(), stdout=said, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def asked(folder: Path, question: str) -> list[tuple[object, ...]]:
    try:
        with closing(open_store(folder / "logs" / "run.sqlite", readonly=True)) as db:
            return [tuple(row) for row in db.execute(question)]
    except StoreError:  # not there, or just being made
        return []


def slow_loaders(folder: Path) -> set[object]:
    """Other causes are not asked for: on a busy machine they are as true."""
    return {rank for (rank,) in asked(folder, f"SELECT rank FROM finding WHERE cause = '{SLOW}'")}


@pytest.mark.measures
@pytest.mark.processes
def test_who_loads_data_slowly_is_named_once_it_does(tmp_path: Path) -> None:
    """That nobody is named where all are alike is the law of tests/telemetry/test_stragglers.py."""
    with training(tmp_path) as launcher:
        enough = f"SELECT rank FROM step GROUP BY rank HAVING MAX(step) >= {HEALTHY_STEPS}"
        assert eventually(lambda: len(asked(tmp_path, enough)) == 2, 90), (tmp_path / "said").read_text()
        assert slow_loaders(tmp_path) == set()  # the broken twin: the same run, before anybody is slow
        (tmp_path / "slow").touch()
        assert eventually(lambda: slow_loaders(tmp_path) == {1}, 30), asked(tmp_path, "SELECT * FROM finding")
        (tmp_path / "end").touch()
        assert launcher.wait(100) == 0, (tmp_path / "said").read_text()
    assert slow_loaders(tmp_path) == {1}

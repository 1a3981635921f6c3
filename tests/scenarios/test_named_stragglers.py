"""A straggler of a real run is named in its store, with its cause; nobody is where all are alike."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.paths import ROOT

from gossamer.telemetry import open_store

SCRIPT = """
import sys, time
import torch, gossamer

DEVICE_SECONDS, DATA_SECONDS, TRAINING_SECONDS = 0.03, float(sys.argv[1]), 7.0

torch.set_num_threads(1)
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with gossamer.attach(model, optimizer, "Dense()") as session:
    end = time.monotonic() + TRAINING_SECONDS
    for step in range(10_000):
        if world.rank == 1:
            time.sleep(DATA_SECONDS)
        loss = model(torch.randn(4, 8)).square().mean()
        time.sleep(DEVICE_SECONDS)  # what an accelerator would take
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 and time.monotonic() > end:
            session.ask_to_stop()
"""


def findings(folder: Path, data_seconds: float) -> set[tuple[int, str]]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--logs", str(folder / "logs")]
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, str(folder / "train.py"), str(data_seconds)], env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with closing(open_store(folder / "logs" / "run.sqlite")) as db:
        (steps,) = db.execute("SELECT max(step) FROM step").fetchone()
        assert steps > 30, "there was something to look at"
        return {tuple(row) for row in db.execute("SELECT rank, cause FROM finding")}


@pytest.mark.processes
@pytest.mark.parametrize(("data_seconds", "expected"), [(0.06, {(1, "data loading")}), (0.0, set())])
def test_who_loads_data_slowly_is_named_and_nobody_else(
    tmp_path: Path, data_seconds: float, expected: set[tuple[int, str]]
) -> None:
    assert findings(tmp_path, data_seconds) == expected

"""Elastic runs of real processes: workers are killed, or leave, and come back; all end with the same parameters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import nightly

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys
import torch
import gossamer

torch.set_num_threads(1)
world = gossamer.init()
place = int(os.environ["GOSSAMER_PLACE"])
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
session = gossamer.attach(model, optimizer, sys.argv[1], scheduler=scheduler)
changes = []
session.on_change(lambda change: changes.append((len(change.lost), change.joined)))
settled = 0
while settled < 5:
    if place == 1 and first_life and session.steps >= 5:
        os.kill(os.getpid(), int(sys.argv[2]))
    x = torch.randn(4, 8)
    model(x).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if world.size == int(sys.argv[3]) and session.steps > 8:
        settled += 1
with session.averaged_parameters(model):
    numbers = torch.cat([p.detach().flatten() for p in model.parameters()])
about = session.steps, world.size, scheduler.last_epoch, numbers.double().sum().item().hex()
print("ended", place, *about, changes, flush=True)
"""


def ends(directory: Path, recipe: str, signal: str, size: int, *options: str) -> tuple[list[list[str]], str]:
    """What the workers said at their ends: place, steps, workers, scheduler's epoch, parameters; and all the output."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2:3", "--logs", str(directory / "logs")]
    done = subprocess.run(
        [*command, *options, str(script), recipe, signal, str(size)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=150,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return [line.split()[:5] for line in re.findall(r"\bended (.*)", output)], output


@pytest.mark.parametrize(
    "recipe", ["TopK(0.5)", *nightly("Gossip() + TopK(0.5) + Ring()", "LocalSGD(period=2) + Int8()")]
)
def test_promise_1_a_killed_worker_comes_back_and_all_agree(tmp_path: Path, recipe: str) -> None:
    found, output = ends(tmp_path, recipe, "9", 3, "--max-restarts", "1")
    assert sorted(place for place, *_ in found) == ["0", "1", "2"], output
    assert len({tuple(rest) for _, *rest in found}) == 1, output
    assert "rank 1 was lost (signal SIGKILL). The other 2 continue; restarting it" in output
    assert "[(1, 0), (0, 1)]" in output  # a loss, then a newcomer
    record = json.loads((tmp_path / "logs" / "record.json").read_text())
    assert record["workers"] == 3


def test_promise_21_a_worker_that_is_asked_to_leave_is_no_loss(tmp_path: Path) -> None:
    found, output = ends(tmp_path, "TopK(0.5)", "15", 2)
    assert sorted(place for place, *_ in found) == ["0", "2"], output
    assert len({tuple(rest) for _, *rest in found}) == 1, output
    assert "was lost (signal" not in output

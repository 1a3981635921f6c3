"""Workers with a server are killed; gossamer.mean and gather run over those that are left: real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gossamer.cli.main import gossamer

# Rank 2 is killed, comes back, takes part in a call, and is killed for good
TRAINING = """
import json, os, signal
import torch
import gossamer

world = gossamer.init()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = {"before": gossamer.gather(world.rank)}
model = torch.nn.Linear(1, 1)
session = gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))

def step():
    model(torch.ones(1, 1)).sum().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()

step()
if world.rank == 2 and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 2:
    open("back", "w").close()
while not os.path.exists("back"):
    step()
found["with"] = gossamer.mean(float(world.rank))
if world.rank == 2:
    json.dump(found, open("found-2", "w"))
    os.kill(os.getpid(), signal.SIGKILL)
found["without"] = gossamer.mean(float(world.rank))
session.close()
found["after"] = gossamer.gather(world.rank)
json.dump(found, open(f"found-{world.rank}", "w"))
"""


@pytest.mark.processes
def test_calls_run_over_survivors_and_over_workers_that_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    options = ["--workers", "3", "--servers", "1", "--max-restarts", "1", "--recipe", "ParameterServer('async')"]
    done = CliRunner().invoke(gossamer, ["run", *options, "--json", "out.json", "train.py"])
    assert done.exit_code == 0, done.output
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(3)]
    left = {"before": [0, 1, 2], "with": 1.0, "without": 0.5, "after": [0, 1]}
    assert found == [left, left, {"before": [0, 1, 2], "with": 1.0}]
    assert "gossamer.mean covers ranks 0 and 1, without rank 2" in " ".join(done.output.split())
    assert json.loads((tmp_path / "out.json").read_text())["lost"] == [2]

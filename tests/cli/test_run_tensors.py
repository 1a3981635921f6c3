"""A run's store says what every tensor costs each of its workers."""

from __future__ import annotations

from contextlib import chdir, closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer
from gossamer.observe.telemetry import open_store

TRAINING = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer):
    for step in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.processes
def test_the_store_says_what_every_tensor_costs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    with chdir(tmp_path), engine_files_left_open():
        command = ["run", "--workers", "2", "--recipe", "TopK(density=0.25)", "--logs", "logs", "train.py"]
        done = CliRunner().invoke(gossamer, command)
    assert done.exit_code == 0, done.output
    asked = "SELECT name, rank, numel, bytes > 0, gradient_norm > 0, energy_share > 0.25, energy_share < 1 FROM tensor"
    with closing(open_store(tmp_path / "logs" / "run.sqlite", readonly=True)) as db:
        told = {tuple(row) for row in db.execute(asked)}
    assert {("weight", rank, 4096, 1, 1, 1, 1) for rank in range(2)} <= told
    assert {name for name, *_ in told} == {"weight", "bias"}

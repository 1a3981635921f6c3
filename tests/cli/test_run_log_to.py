"""`gossamer run --log-to`: two real workers, and files where tools look for them."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer

TRAINING = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    session.log(loss=loss.item())
"""


@pytest.mark.processes
def test_a_run_is_logged_where_tools_look_for_it(tmp_path: Path) -> None:
    places = ("--log-to", "jsonl:out/metrics.jsonl", "--log-to", "tensorboard:tb", "--log-to", "jsonl:train.py/x")
    (tmp_path / "train.py").write_text(TRAINING)
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", *places, "train.py"])
    assert done.exit_code == 0, done.output
    for rank, name in enumerate(("metrics.jsonl", "metrics-1.jsonl")):
        lines = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line["values"]] == [1, 2, 3]
        assert {line["rank"] for line in lines} == {rank}
    assert sorted(os.listdir(tmp_path / "tb")) == ["rank-0", "rank-1"]
    assert "train.py/x takes no numbers of this worker now (File exists)" in " ".join(done.output.split())

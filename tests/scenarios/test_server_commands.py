"""Commands of the table of names in docs/servers.md: every recipe in it trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.paths import ROOT
from support.processes import engine_files_left_open

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.cli.main import gossamer
from gossamer.launch import standby

SCRIPT = """
import torch
import gossamer

torch.manual_seed(0)
world = gossamer.init()
model = torch.nn.Linear(20, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer) as session:
    for step in range(10):
        torch.manual_seed(world.size * step + world.rank)
        loss = model(torch.randn(4, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
"""


def commands() -> list[list[str]]:
    """The different ones in the right column of the table; an all-reduce is run by all other tests."""
    table = (ROOT / "docs" / "servers.md").read_text().partition("## What others call it")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "--recipe" in row]
    assert len(rows) >= 6
    found = [re.search(r"`([^`]*--recipe \"[^\"]*\")", row.rpartition(" | ")[2]) for row in rows]
    texts = dict.fromkeys(each[1] for each in found if each is not None)
    assert sum(each is not None for each in found) == len(rows)
    return [shlex.split(text) for text in texts if "Dense()" not in text]


@pytest.mark.processes
@pytest.mark.parametrize("options", commands(), ids=" ".join)
def test_every_command_of_the_table_trains(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(standby, "DELAY_SECONDS", 600.0)  # nobody is lost, so nobody need stand by
    Path("train.py").write_text(SCRIPT)
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "2", "--json", "record.json", *options, "train.py"])
    assert done.exit_code == 0, done.output
    found = json.loads(Path("record.json").read_text())
    assert found["workers_agree"] is True, done.output
    assert found["recipe"] == repr(resolve(options[-1], 2))
    assert found["metrics"]["loss"][-1][2] < found["metrics"]["loss"][0][2]
    assert found["servers"]["applied"] == 20

"""Recipes of parameter servers in the table of names of other libraries: each of them trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.nightly import nightly
from support.processes import engine_files_left_open

from gossamer.algorithms.recipes.other_names import OTHER_NAMES
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.cli.main import gossamer
from gossamer.launcher import process

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
    """For each recipe of servers in the table of other names: beside the workers, or in processes of their own."""
    recipes = dict.fromkeys(other.recipe for other in OTHER_NAMES if other.recipe.startswith("ParameterServer("))
    assert len(recipes) >= 4
    return [[*([] if "shards" in recipe else ["--servers", "2"]), "--recipe", recipe] for recipe in recipes]


COMMANDS = commands()
BY_DAY = [next(each for each in COMMANDS if ("--servers" in each) == apart) for apart in (True, False)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [*BY_DAY, *nightly(*(each for each in COMMANDS if each not in BY_DAY))], ids=" ".join
)
def test_every_command_of_the_table_trains(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 600.0)  # nobody is lost, so nobody need stand by
    Path("train.py").write_text(SCRIPT)
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "2", "--json", "record.json", *options, "train.py"])
    assert done.exit_code == 0, done.output
    found = json.loads(Path("record.json").read_text())
    assert found["workers_agree"] is True, done.output
    assert found["recipe"] == repr(resolve(options[-1], 2))
    assert found["metrics"]["loss"][-1][2] < found["metrics"]["loss"][0][2]
    assert found["servers"]["applied"] == 20

"""Whatever is for workers that stay says so of a federated recipe, in one line, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.command_line import refusal
from torch import nn

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.train.traffic.traffic import estimate_traffic

RECIPE = "FedAvg(fraction=0.5) + TopK(0.01)"
SAID = "FedAvg(fraction=0.5) is a federated strategy"
INSTEAD = "Run `gossamer federate --recipe ... SCRIPT`, or write LocalSGD(period=8) here."


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('it was started')")
    return str(path)


COMMANDS = [
    ("run", "--workers", "2", "--recipe", RECIPE, "SCRIPT"),
    ("compare", "--recipe", "Dense()", "--recipe", RECIPE, "SCRIPT"),
    ("rehearse", "--shapes", "resnet50", "--step-seconds", "0.1", "--recipe", RECIPE),
    ("simulate", "--workers", "4", "--network", "100mbit,20ms", "--recipe", RECIPE, "SCRIPT"),
    ("simulate", "--workers", "4", "--network", "100mbit,20ms", "--recipe", RECIPE, "--parameters", "1000"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_refuse_it_before_anything_starts(command: tuple[str, ...], script: str) -> None:
    said = " ".join(refusal(*(script if each == "SCRIPT" else each for each in command)).split())
    assert SAID in said
    assert INSTEAD in said
    assert "it was started" not in said


@pytest.mark.parametrize(
    "strategy", ["FedAvg()", "SCAFFOLD()", "FedBuff()", "FedOpt('yogi')", "FedProx(0.1)", "FedNova()"]
)
def test_sessions_and_estimates_refuse_it(strategy: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="is a federated strategy"):
        gossamer.attach(model, optimizer, recipe=strategy)
    dense = assumed(1000, resolve("Dense()"))
    with pytest.raises(AttachError, match="Run `gossamer federate"):
        estimate_traffic(resolve(strategy), dense, workers=4)
    gossamer.attach(model, optimizer, recipe="Dense()").close()  # nothing is left of what was refused

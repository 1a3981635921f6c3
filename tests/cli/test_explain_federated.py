"""`gossamer explain` on federated recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.explaining import run

SCRIPT = """
import sys
import torch
import gossamer.federated

width = int(sys.argv[sys.argv.index("--workers") + 1])

@gossamer.federated.model
def make():
    print("made")
    return torch.nn.Sequential(torch.nn.Linear(width, 10), torch.nn.BatchNorm1d(10))

@gossamer.federated.client
def train(model, round):
    raise AssertionError("nothing is trained")
"""

ATTACHING = """
import torch, gossamer
model = torch.nn.Linear(5, 1)
gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe="Dense()")
raise AssertionError("it went on")
"""


def row(output: str, start: str) -> list[int]:
    line = next(line for line in output.splitlines() if line.strip().startswith(f"{start} "))
    return [int(each.replace(",", "")) for each in line.strip().removeprefix(start).split()[:2]]


def test_a_round_is_priced() -> None:
    code, output = run("FedAvg(fraction=0.1)", "--workers", "100", "--parameters", "1000000")
    assert code == 0
    assert "recipe      FedAvg() + Dense() + Complete()" in output
    assert "10 of 100 devices train" in output
    assert "1 pass over the device's data per round" in output
    assert row(output, "up") == row(output, "down") == [4_000_000, 40_000_000]
    assert "100.00% of FedAvg() without compression" in output
    assert "epsilon" not in output


def test_what_is_sent_follows_from_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    recipe = "SCAFFOLD(fraction=0.5, local_steps=3, pull=Int8()) + TopK(0.01)"
    code, output = run(recipe, "--workers", "8", "--parameters", "200000", "--json", str(file))
    assert code == 0
    told = json.loads(file.read_text())
    assert told["recipe"].startswith("SCAFFOLD(fraction=0.5, local_steps=3, pull=Int8())")
    assert "3 steps per round" in output
    assert row(output, "up") == [told["round"]["up_bytes"], told["round"]["server_up_bytes"]]
    assert told["round"]["server_up_bytes"] == 4 * told["round"]["up_bytes"] < 4 * 2 * 800_000 * 0.1
    assert told["round"]["down_bytes"] < 2 * 800_000
    assert "for each version since its last" in output
    assert f"residuals {told['round']['residual_bytes']:,}" in output


def test_asynchronous_rounds_and_masks_are_reported() -> None:
    output = run("FedBuff(20, fraction=0.3)", "--workers", "100")[1]
    assert "30 devices train concurrently; every 20 contributions make a version" in output
    assert "masked; keys" in run("FedAvg(secure=SecureAggregation())", "--workers", "100")[1]
    assert "including all contributions, for Median()" in run("FedAvg(aggregator=Median())", "--workers", "100")[1]


def test_the_model_of_a_federated_script_is_priced(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    code, output = run("FedAvg()", "--workers", "20", str(path), "--workers", "50")
    assert code == 0
    assert f"{50 * 10 + 10 + 40:,} in 6 tensors ({path})" in output
    assert row(output, "up") == [4 * 550, 2 * 4 * 550]


def test_a_script_that_attaches_is_refused_before_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ATTACHING)
    code, output = run("FedAvg()", str(path))
    assert code == 1
    assert "cannot be attached to workers" in output


@pytest.mark.parametrize(
    "options", [("--network", "100mbit,20ms", "--step-seconds", "1"), ("--step-seconds", "1"), ("--own-machines",)]
)
def test_times_of_steps_are_no_federations(options: tuple[str, ...]) -> None:
    code, output = run("FedAvg()", *options)
    assert code == 2
    assert "a federation has no step time to estimate" in output

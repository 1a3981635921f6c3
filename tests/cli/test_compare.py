"""Recipes side by side at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import output_of

from gossamer.cli import compare
from gossamer.cli.compare import compare_command

TRAIN = """
import torch
from torch import nn
import gossamer

world = gossamer.init()
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = gossamer.attach(model, optimizer)
draw = torch.Generator().manual_seed(world.rank)
for step in range(100_000):
    loss = model(torch.randn(16, 64, generator=draw)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {log}
"""


def run(*arguments: str) -> tuple[int, str]:
    return output_of(compare_command, *arguments)


@pytest.mark.processes
def test_two_recipes_are_trained_and_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(log="session.log(loss=1 / (step + 1))"))
    files = {name: tmp_path / name for name in ("found.json", "page.html", "curves.png")}
    code, said = run(
        *("--recipe", "Dense()", "--recipe", "TopK(density=0.1)", "--until", "loss<0.1"),
        *("--json", str(files["found.json"]), "--page", str(files["page.html"]), "--plot", str(files["curves.png"])),
        str(script),
    )
    assert code == 0, said
    found = json.loads(files["found.json"].read_text())
    dense, sparse = found["records"]
    assert dense["final"]["loss"] < 0.1
    assert 10 < dense["steps"] <= 13
    assert dense["workers_agree"]
    assert sparse["bytes_sent_per_step"]["accounted"] < dense["bytes_sent_per_step"]["accounted"]
    assert found["comparison"]["rows"][0]["seconds_to_target"] is not None
    assert "to loss<0.1" in said
    page = files["page.html"].read_text()
    assert "TopK(density=0.1)" in page
    assert "://" not in page  # no address; a picture in base64 has no colon, and may spell anything else
    assert files["curves.png"].stat().st_size > 10_000


@pytest.mark.processes
def test_a_script_that_logs_no_loss_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(log="pass"))
    code, said = run("--recipe", "Int8()", "--seconds", "0.5", str(script))
    assert code == 0, said
    assert "session.log(loss=loss.item())" in said


@pytest.mark.parametrize("option", ["--json", "--plot", "--page"])
def test_what_could_not_be_written_is_refused_before_anything_is_trained(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_train", lambda *_: pytest.fail("it was trained"))
    (tmp_path / "train.py").write_text("")
    code, said = run("--recipe", "Dense()", option, str(tmp_path / "missing" / "file"), str(tmp_path / "train.py"))
    assert (code, "there is no directory" in said) == (2, True), said


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        (["--recipe", "TopK(0.01)", "--recipe", "home"], ["same recipe", "'home'"]),
        (["--recipe", "TopJ(0.01)"], ["TopK"]),
        (["--recipe", "Dense()", "--until", "loss"], ["validation_loss<2.2"]),
        (["--recipe", "Dense()", "--workers", "1"], ["x>=2"]),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], ops: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    code, said = run(*arguments, str(script))
    assert code == 2
    assert all(op in said for op in ops), said

"""gossamer advise at the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import output_of, refusal

from gossamer.advise.advice_file import read_advice
from gossamer.advise.advisor import affordable
from gossamer.advise.race import RaceError
from gossamer.cli import advise
from gossamer.cli.advise import advise_command

TRAIN = """
import torch
from torch import nn
import gossamer

world = gossamer.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
draw = torch.Generator().manual_seed(2 + world.rank)
with gossamer.attach(model, optimizer) as session:
    for step in range(3000):
        x = torch.randn(16, 64, generator=draw)
        loss = (model(x) - (x @ truth).sign()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_without_a_network_it_says_what_to_write(script: Path) -> None:
    assert "--network 100mbit,20ms" in refusal("advise", str(script))


def test_links_are_not_measured_from_one_machine_alone(script: Path) -> None:
    said = refusal("advise", "--network", "here", str(script))
    assert "gossamer doctor --nnodes" in " ".join(said.split())


@pytest.mark.parametrize("option", [("--until", "loss"), ("--minutes", "0"), ("--workers", "1"), ("--most", "0")])
def test_options_that_mean_nothing(script: Path, option: tuple[str, str]) -> None:
    refusal("advise", "--network", "100mbit", *option, str(script))


def test_a_budget_for_no_race_is_refused_with_what_it_takes() -> None:
    assert affordable(600.0, 0.1) == 374
    with pytest.raises(RaceError, match="Write --minutes 32 or more"):
        affordable(600.0, 60.0)


def test_a_failure_of_a_stage_is_one_sentence(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RaceError("it says so")

    monkeypatch.setattr(advise, "_advised", fail)
    code, said = output_of(advise_command, "--network", "100mbit", str(script))
    assert code == 1
    assert "it says so" in said


@pytest.mark.processes
def test_from_a_script_to_a_recipe_that_can_be_run(tmp_path: Path, script: Path) -> None:
    """End to end: profile, foretell, race, say; then the recipe is named by the file."""
    files = {name: tmp_path / f"advice.{name}" for name in ("json", "html")}
    gossamer = [sys.executable, "-m", "gossamer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*gossamer, "advise", "--workers", "2", "--network", "1mbit,20ms", "--minutes", "0.1", "--most", "4"]
    command += ["--json", str(files["json"]), "--page", str(files["html"]), str(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for stage in ("profile ", "foretell ", "race "):
        assert f"\n{stage}" in f"\n{ended.stdout}"
    advice = read_advice(files["json"])
    assert advice.recipe in ended.stdout
    assert advice.contenders[0].recipe == "Dense()"
    assert advice.command in files["html"].read_text() or "&#x27;" in files["html"].read_text()
    explain = [*gossamer, "explain", f"@{files['json']}", "--workers", "2"]
    told = subprocess.run(explain, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "bytes per worker" in told

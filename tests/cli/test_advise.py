"""gossamer advise at the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from support.command_line import output_of, refusal
from support.planted_races import Planted, PlantedField

from gossamer.cli import advise
from gossamer.cli.advise import _confirm, advise_command
from gossamer.cli.explain import explain
from gossamer.plan.advise.advice_file import Advice, read_advice
from gossamer.plan.advise.advisor import affordable
from gossamer.plan.advise.answer import Setting
from gossamer.plan.advise.race import Race, RaceError

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


def test_without_a_network_it_names_the_line_to_write(script: Path) -> None:
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


@pytest.mark.parametrize("step_seconds", [0.9, 1.9, 2.5, 4.1, 10.03])
def test_the_budget_that_the_error_names_is_enough(step_seconds: float) -> None:
    with pytest.raises(RaceError) as refused:
        affordable(20.0, step_seconds)
    minutes = re.search(r"--minutes (\d+)", str(refused.value))
    assert minutes is not None
    assert affordable(60.0 * int(minutes[1]), step_seconds) >= 1


def test_a_failure_of_a_stage_is_one_sentence(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RaceError("it says so")

    monkeypatch.setattr(advise, "_advised", fail)
    code, said = output_of(advise_command, "--network", "100mbit", str(script))
    assert code == 1
    assert "it says so" in said


def test_a_report_of_links_cannot_be_emulated(script: Path) -> None:
    assert "--network 100mbit,20ms in addition to --links" in refusal(
        "advise", "--links", "l.json", "--confirm", str(script)
    )


def test_the_best_and_dense_are_run_for_real(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(recipe: str, workers: int, network: str, limits: Mapping[str, str], *_: object) -> dict[str, Any]:
        assert (workers, network, limits[advise.SECONDS]) == (2, "1mbit", "30")
        seconds = 0.1 if recipe == "Dense()" else 0.04
        return {
            "recipe": recipe,
            "workers": workers,
            "steps": 20,
            "seconds": 20 * seconds,
            "seconds_per_step": {"median": seconds, "p90": seconds},
            "compute_seconds_per_step": 0.01,
            "waiting_seconds_per_step": seconds - 0.01,
            "bytes_sent_per_step": {"accounted": 1e5, "interface": None},
            "metrics": {"loss": [[step, step * seconds, 1 / step] for step in range(1, 21)]},
        }

    planted = PlantedField({"Dense()": Planted(step_seconds=1.0), "Int8()": Planted(step_seconds=0.5)})
    race = Race(start=planted.start, baseline="Dense()", challengers=["Int8()"], budget_seconds=2000, now=planted.now)
    monkeypatch.setattr(advise, "train_for_record", train)
    best, dense = _confirm(race.run(), Setting(script="train.py", arguments=(), workers=2, network="1mbit"), 30.0)
    assert (best.recipe, best.estimated_step_seconds, best.measured_step_seconds) == ("Int8()", 0.5, 0.04)
    assert dense.recipe == "Dense()"
    assert best.loss is not None
    assert dense.loss is not None
    assert best.loss < dense.loss
    assert "Int8(): estimated 500 ms a step, measured 40 ms, loss" in capsys.readouterr().out


def test_the_advice_is_written_before_real_runs_that_may_fail(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = dict.fromkeys(("gain", "cost", "command"), "")
    numbers = {"workers": 2, "race_seconds": 1.0, "confidence": 0.95}
    about = {"use": "use Int8()", "script": "train.py", "network": "1mbit", "metric": "loss"}
    found = Advice(recipe="Int8()", change=True, **about, **texts, **numbers)  # type: ignore[arg-type]

    def fail(*_: Any) -> None:
        raise click.ClickException("no network can be emulated here")

    monkeypatch.setattr(advise, "_advised", lambda *_: (found, None))
    monkeypatch.setattr(advise, "_confirm", fail)
    file, page = tmp_path / "advice.json", tmp_path / "advice.html"
    outputs = ("--json", str(file), "--page", str(page))
    assert "no network can be emulated" in refusal("advise", "--network", "1mbit", "--confirm", *outputs, str(script))
    assert read_advice(file) == found
    assert "Int8()" in page.read_text()


@pytest.mark.processes
@pytest.mark.timeout(300)  # 20 seconds of work, on a machine that may have more to do
def test_from_a_script_to_a_recipe_that_can_be_run(tmp_path: Path, script: Path) -> None:
    """End to end: profile, estimate, race, answer; then the file names the recipe."""
    files = {name: tmp_path / f"advice.{name}" for name in ("json", "html")}
    limits = ["--workers", "2", "--network", "1mbit,20ms", "--minutes", "0.1", "--most", "4"]
    written = ["--json", str(files["json"]), "--page", str(files["html"])]
    code, said = output_of(advise_command, *limits, *written, str(script))
    assert code == 0, said
    for stage in ("profile ", "estimate ", "race "):
        assert f"\n{stage}" in f"\n{said}"
    advice = read_advice(files["json"])
    assert advice.recipe in said
    assert advice.contenders[0].recipe == "Dense()"
    assert advice.command in files["html"].read_text() or "&#x27;" in files["html"].read_text()
    code, told = output_of(explain, f"@{files['json']}", "--workers", "2")
    assert code == 0, told
    assert "bytes per worker" in told

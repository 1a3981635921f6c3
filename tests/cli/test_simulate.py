"""`gossamer simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.command_line import refusal
from support.simulated_scripts import script

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.cli import simulate
from gossamer.cli.main import gossamer
from gossamer.plan.simulate import SimulatedJob, SimulationError

NETWORK = "100mbit,20ms; 1mbit,20ms at 0.3s"
BOTH = ("--recipe", "Dense()", "--recipe", "TopK(density=0.1)")


def simulated(*arguments: str) -> tuple[int, str, str]:
    """The exit code, and what stands on standard output and errors."""
    options = ["--workers", "3", "--network", NETWORK, "--step-seconds", "0.1"]
    found = CliRunner().invoke(gossamer, ["simulate", *options, *arguments])
    return found.exit_code, found.stdout, found.stderr


def test_a_row_for_each_recipe_and_a_curve(tmp_path: Path) -> None:
    file, record, picture = script(tmp_path), tmp_path / "simulated.json", tmp_path / "loss.png"
    code, shown, aside = simulated(
        *BOTH, "--steps", "5", "--json", str(record), "--picture", str(picture), str(file), "9"
    )
    assert code == 0, (shown, aside)
    header, dense, sparse = shown.strip().splitlines()
    assert header.split("  ")[0] == "recipe"
    assert dense.startswith("Dense()")
    assert sparse.startswith("TopK(density=0.1)")
    assert aside.count(" for 3 workers, each ") == 2
    found = json.loads(record.read_text())
    runs = found["runs"]
    assert [run["recipe"] for run in runs] == ["Dense()", "TopK(density=0.1)"]
    assert [run["steps"] for run in runs] == [5, 5]
    assert found["network"] == NETWORK
    for run in runs:
        moments = [seconds for _, seconds, _ in run["metrics"]["loss"]]
        steps = [later - sooner for sooner, later in zip([0.0, *moments], moments, strict=False)]
        assert steps[0] < steps[-1]  # the network has become slower
        assert run["seconds"] == pytest.approx(sum(steps))
        assert run["seconds_per_step"] == pytest.approx(run["seconds"] / 5)
    assert runs[0]["metrics"]["loss"][0][2] == runs[1]["metrics"]["loss"][0][2]
    assert runs[0]["bytes_sent_per_step"] > runs[1]["bytes_sent_per_step"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_it_ends_where_it_is_told_or_the_script_ends(tmp_path: Path) -> None:
    file, record = script(tmp_path), tmp_path / "simulated.json"
    code, shown, aside = simulated("--recipe", "Dense()", "--steps", "7", "--json", str(record), str(file), "3")
    assert code == 0, shown
    assert "the script ended after 3 steps, before the requested 7" in aside.replace("\n", " ")
    code, shown, aside = simulated("--recipe", "Dense()", "--seconds", "0.35", "--json", str(record), str(file), "9")
    assert code == 0, aside
    assert 0.1 < json.loads(record.read_text())["runs"][0]["seconds"] <= 0.35


def test_a_row_without_steps_is_explained(tmp_path: Path) -> None:
    balanced = "LocalSGD(period=20, balance=True)"
    code, _, aside = simulated(
        "--recipe", "Dense()", "--recipe", balanced, "--seconds", "0.35", str(script(tmp_path)), "40"
    )
    assert code == 0, aside
    said = " ".join(aside.split())
    assert f"{balanced}: its first round takes longer than 350 ms of virtual time. Raise --seconds" in said
    assert "Dense(): its first round" not in said


def test_a_failure_is_reported_and_others_are_shown(tmp_path: Path) -> None:
    text = "import gossamer, torch\nmodel = torch.nn.Linear(2, 1)\n"
    text += "gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))\nraise ValueError('no data')\n"
    code, shown, aside = simulated("--recipe", "Dense()", str(script(tmp_path, text)))
    assert code == 1
    assert re.search(r"Dense\(\): rank \d failed after step 0: ValueError: no data \(train.py, line 4\)", aside)
    assert "Add session.log" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--network", "100mbit; 10mbit", "--recipe", "Dense()"), "has no time"),
        (("--network", "100mbit", "--recipe", "FedAvg(local_steps=2)"), "gossamer federate"),
        (("--network", "100mbit", "--recipe", "Dense()", "--recipe", "EveryStep()"), "are the same recipe"),
        (("--network", "100mbit", "--recipe", "Dens()"), "Dens"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refusal("simulate", "--workers", "2", *arguments, str(script(tmp_path)), "3")


@pytest.mark.parametrize(
    "option",
    ["--steps=3", "--seconds=4", "--servers=1", "--learning-rate-factor=2", "--picture=loss.png"],
)
def test_options_of_a_training_are_refused_without_one(option: str) -> None:
    arguments = ("--workers", "2", "--network", "100mbit", "--recipe", "Dense()", "--step-seconds", "0.1")
    found = refusal("simulate", *arguments, "--parameters", "1000", option)
    assert f"{option.partition('=')[0]} requires a SCRIPT" in found


def test_steps_are_timed_once_for_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def timed(file, arguments, recipe, workers):  # type: ignore[no-untyped-def]
        asked.append((repr(recipe), workers))
        return simulate.assume_profile(simulate.attached_by(file, arguments, recipe), recipe, 0.1, workers=2)

    monkeypatch.setattr(simulate, "profile_script", timed)
    options = ["--workers", "2", "--network", NETWORK, *BOTH, "--steps", "9"]
    found = CliRunner().invoke(gossamer, ["simulate", *options, str(script(tmp_path)), "9"])
    assert found.exit_code == 0, found.output
    assert [workers for _, workers in asked] == [2, 2]


def test_compressors_are_timed_for_all_workers_if_the_compute_time_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `gossamer explain` does: a worker decodes the payloads of the others."""
    asked: list[int] = []
    assumed = simulate.assume_profile
    monkeypatch.setattr(simulate, "assume_profile", lambda *given: asked.append(given[-1]) or assumed(*given))
    options = ["--workers", "3", "--network", NETWORK, *BOTH, "--steps", "2", "--step-seconds", "0.1"]
    found = CliRunner().invoke(gossamer, ["simulate", *options, str(script(tmp_path)), "9"])
    assert found.exit_code == 0, found.output
    assert asked == [3, 3]


BY_SPEED = """
import sys, torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = gossamer.attach(model, optimizer)
while session.steps < 40:
    loss = model(torch.randn(2, 3)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.log(loss=loss.item())
session.close()
"""


def test_speeds_show_the_used_part_of_them(tmp_path: Path) -> None:
    file, record = script(tmp_path, BY_SPEED), tmp_path / "simulated.json"
    recipes = ("--recipe", "LocalSGD(10)", "--recipe", "LocalSGD(10, balance=True)")
    code, shown, aside = simulated(*recipes, "--speeds", "1x2,0.5", "--json", str(record), str(file))
    assert code == 0, aside
    header, plain, balanced = shown.strip().splitlines()
    assert header.endswith("used speed")
    found = json.loads(record.read_text())
    assert found["speeds"] == [1.0, 1.0, 0.5]
    waiting, dividing = found["runs"]
    assert (waiting["parts"], dividing["parts"]) == (120, 30 + 3 * 25)
    assert waiting["speed_use"] < dividing["speed_use"] < 1
    for line, run in ((plain, waiting), (balanced, dividing)):
        assert line.endswith(f"{run['speed_use']:.2f}")


def test_shapes_of_unequal_workers_wait_for_the_slowest_or_for_none(tmp_path: Path) -> None:
    record = tmp_path / "costs.json"
    recipes = ("Dense()", "LocalSGD(10, balance=True)", "ParameterServer('async')", "ParameterServer('sync')")
    asked = [word for recipe in recipes for word in ("--recipe", recipe)]
    options = ["--workers", "4", "--network", "10gbit", "--step-seconds", "1", "--parameters", "10000"]
    found = CliRunner().invoke(gossamer, ["simulate", *options, "--speeds", "1x3,0.2", *asked, "--json", str(record)])
    assert found.exit_code == 0, found.output
    seconds = [each["seconds"] for each in json.loads(record.read_text())]
    assert seconds == pytest.approx([5.0, 1.0, 4 / 3.2, 5.0], rel=0.01)


@pytest.mark.parametrize("failure", [SimulationError("too little memory"), KeyboardInterrupt()])
def test_recipes_before_a_failure_are_shown(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = simulate._simulate

    def fail_later(job: SimulatedJob, recipe: str, *more: Any) -> Any:
        if recipe != "Dense()":
            raise failure
        return real(job, recipe, *more)

    monkeypatch.setattr(simulate, "_simulate", fail_later)
    record = tmp_path / "simulated.json"
    code, shown, aside = simulated(*BOTH, "--steps", "2", "--json", str(record), str(script(tmp_path)), "9")
    assert code == 1
    assert "Dense()      2" in shown
    assert ("too little memory" in aside) == isinstance(failure, SimulationError)
    assert [run["recipe"] for run in json.loads(record.read_text())["runs"]] == ["Dense()"]


def test_prices_before_a_failure_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = simulate.step_cost

    def fail_later(recipe: Recipe, *more: Any) -> Any:
        if recipe != resolve("Dense()", 3):
            raise SimulationError("too large")
        return real(recipe, *more)

    monkeypatch.setattr(simulate, "step_cost", fail_later)
    file = tmp_path / "prices.json"
    code, shown, aside = simulated(*BOTH, "--network", "1mbit", "--parameters", "1000", "--json", str(file))
    assert code == 1
    assert "too large" in aside
    assert "Dense()" in shown
    assert len(json.loads(file.read_text())) == 1

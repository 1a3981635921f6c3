"""`gossamer run --forecast`: a forecast of `gossamer explain` beside what is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from support.command_line import output_of, refusal
from support.watched_runs import KINDS, made

from gossamer.cli.explain import explain
from gossamer.cli.forecast_file import read_forecast, verdict
from gossamer.cli.watch import watch_command


def explained(folder: Path, *more: str) -> Path:
    file = folder / "forecast.json"
    code, text = output_of(explain, "Dense()", "--parameters", "10000", *more, "--json", str(file))
    assert code == 0, text
    return file


def test_what_explain_wrote_is_a_forecast(tmp_path: Path) -> None:
    file = explained(tmp_path, "--network", "100mbit,20ms", "--step-seconds", "0.1")
    told = json.loads(file.read_text())
    found = read_forecast(file)
    assert found["estimated_seconds_per_step"] == told["estimate"]["step_seconds"] > 0.1
    assert found["estimated_for"] == {"recipe": told["recipe"], "workers": 4, "network": "100mbit,20ms"}
    low, high = (found["estimated_interval"][end] for end in ("low_seconds", "high_seconds"))
    assert low < found["estimated_seconds_per_step"] < high
    assert told["estimate"]["interval"].items() >= {"low_seconds": low, "high_seconds": high, "coverage": 0.8}.items()


def test_a_forecast_without_an_interval_is_one(tmp_path: Path) -> None:
    file = explained(tmp_path, "--network", "100mbit,20ms", "--step-seconds", "0.1")
    told = json.loads(file.read_text())
    del told["estimate"]["interval"]
    file.write_text(json.dumps(told))
    assert read_forecast(file).keys() == {"estimated_seconds_per_step", "estimated_for"}


FORECAST = {
    "estimated_seconds_per_step": 0.372,
    "estimated_interval": {"low_seconds": 0.35, "high_seconds": 0.41, "coverage": 0.8},
}


@pytest.mark.parametrize(
    ("seconds", "where"), [(0.349, "outside"), (0.351, "inside"), (0.4, "inside"), (1.0, "outside")]
)
def test_what_is_measured_lies_inside_or_outside(seconds: float, where: str) -> None:
    said = verdict(FORECAST, {"seconds_per_step": {"median": seconds}})
    assert said is not None
    assert "estimated: 372 ms, 80 %: 350 to 410 ms" in said
    assert said.endswith(f"it is {where}.")


def test_where_nothing_was_estimated_or_measured_nothing_is_reported() -> None:
    assert verdict({}, {"seconds_per_step": {"median": 1.0}}) is None
    assert verdict(FORECAST, {"seconds_per_step": {"median": None}}) is None
    alone = verdict({"estimated_seconds_per_step": 0.5}, {"seconds_per_step": {"median": 0.4}})
    assert alone == "A step took 400 ms; estimated: 500 ms."


def test_without_a_network_nothing_is_estimated(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match=r"no step time.*--network SPEC --json FILE"):
        read_forecast(explained(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "text",
        "[]",
        "{}",
        '{"estimate": 3, "recipe": "Dense()", "workers": 4}',
        '{"estimate": {"step_seconds": "soon", "inputs": {"network": "lan"}}, "recipe": "Dense()", "workers": 4}',
        '{"estimate": {"step_seconds": 1e999, "inputs": {"network": "lan"}}, "recipe": "Dense()", "workers": 4}',
        '{"estimate": {"step_seconds": 1, "inputs": {"network": "lan"}, "interval": '
        '{"low_seconds": 2, "high_seconds": 1, "coverage": 0.8}}, "recipe": "Dense()", "workers": 4}',
        '{"estimate": {"step_seconds": -1, "inputs": {"network": "lan"}}, "recipe": "Dense()", "workers": 4}',
        "[" * 500,
    ],
)
def test_an_invalid_forecast_is_refused_before_a_run_begins(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "forecast.json"
    file.write_text(content)
    script = tmp_path / "train.py"
    script.touch()
    said = refusal("run", "--forecast", str(file), "--logs", str(tmp_path / "logs"), str(script))
    assert "gossamer explain --network SPEC --json FILE RECIPE SCRIPT" in said
    assert not (tmp_path / "logs").exists()


def test_the_terminal_shows_it(tmp_path: Path) -> None:
    made(tmp_path, KINDS["finished"])
    code, text = output_of(watch_command, "--terminal", str(tmp_path))
    assert code == 0
    assert "estimate" in text
    assert "80 %: " in text


def test_an_estimate_with_an_infinite_number_of_workers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "forecast.json"
    file.write_text('{"estimate": {"step_seconds": 1, "inputs": {"network": "x"}}, "recipe": "a", "workers": 1e999}')
    with pytest.raises(click.BadParameter, match="is not an estimate of `gossamer explain`"):
        read_forecast(file)

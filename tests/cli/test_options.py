"""Checks that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from support.command_line import refusal

from gossamer.cli import options, run
from gossamer.comm.mesh.collective_selector import REQUESTABLE


def test_a_package_that_workers_need_is_missed_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "msgspec" else name)
    said = refusal("run", "--servers", "1", "train.py")
    assert f"Write: {sys.executable} -m pip install msgspec\n" in said
    assert "Traceback" not in said
    assert not Path("runs").exists()


def test_the_recipe_of_an_advice_is_what_workers_are_told(tmp_path: Path) -> None:
    (tmp_path / "advice.json").write_text('{"advice_version": 1, "recipe": "Int8()"}')
    assert options.readable_recipe(f"@{tmp_path}/advice.json") == "Int8()"
    with pytest.raises(click.BadParameter, match="does not exist"):
        options.readable_recipe("@nowhere.json")


@pytest.mark.parametrize("text", ["runs/tb", "tb:runs", "tensorboard:", "prometheus:http"])
def test_a_place_to_log_to_that_is_none_is_refused_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    said = " ".join(refusal("run", "--log-to", text, "train.py").split())
    assert "Invalid value for '--log-to'" in said
    assert "such as" in said
    assert not Path("runs").exists()


def test_an_unknown_congestion_control_is_refused_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    text = " ".join(refusal("run", "--congestion", "nonesuch", "train.py").split())
    assert "Invalid value for '--congestion'" in text
    assert "unavailable congestion control 'nonesuch'" in text
    assert not Path("runs").exists()


def test_the_help_names_every_collective() -> None:
    assert ", ".join(REQUESTABLE) == run.WAYS

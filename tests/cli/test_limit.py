"""`gossamer limit`, and the limits of `gossamer run`: what is refused, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command_line import refusal

from gossamer.cli.limit import limit_command
from gossamer.comm.bandwidth.limits import MachineLimits
from gossamer.launcher.bandwidth_keeper import DailyUsage, read_limits, write_limits


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("logs").mkdir()
    Path("train.py").write_text("")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--upload-limit", "0mbit"), "Write 5mbit, or `none`"),
        (("--download-limit", "20"), "Write a number and one of"),
        (("--upload-limit", "5mbit; none at night"), "none at 22:00-06:00"),
        (("--daily-cap", "0GB"), "10GB"),
        (("--upload-limit", "5mbit", "--network", "100mbit"), "--network 5mbit"),
        (("--upload-limit", "5mbit", "--collective", "engine"), "leave out --collective engine"),
    ],
)
def test_invalid_limits_are_refused_before_workers_start(arguments, hint):
    assert hint in refusal("run", "--workers", "2", *arguments, "train.py")
    assert not Path("runs").exists()


def test_a_run_is_refused_while_the_cap_of_the_day_is_used_up():
    from datetime import datetime

    DailyUsage().add(datetime.now().date(), 10**10)
    assert "after midnight" in refusal("run", "--daily-cap", "10GB", "train.py")


def test_a_change_keeps_the_other_limits():
    write_limits(Path("logs"), MachineLimits().changed({"upload": "5mbit", "daily_cap": "10GB"}))
    assert "upload 2mbit" in CliRunner().invoke(limit_command, ["logs", "--upload", "2mbit"]).output
    assert read_limits(Path("logs")) == MachineLimits().changed({"upload": "2mbit", "daily_cap": "10GB"})


@pytest.mark.parametrize("change", [("--upload", "0kbit"), ("--daily-cap", "1B")])
def test_an_invalid_change_is_refused_and_changes_nothing(change):
    before = MachineLimits().changed({"upload": "5mbit"})
    write_limits(Path("logs"), before)
    assert "Write" in refusal("limit", "logs", *change)
    assert read_limits(Path("logs")) == before


def test_a_run_without_limits_cannot_be_limited():
    assert "--upload-limit none" in refusal("limit", "logs", "--upload", "2mbit")
    Path("train.py").touch()
    assert "--upload-limit none" in refusal("limit", "train.py", "--upload", "2mbit")

"""How long a worker waits for the others: the argument, the variable, and what neither may be."""

from __future__ import annotations

import sys
from datetime import timedelta
from math import inf

import click
import pytest

from gossamer.cli import main
from gossamer.comm.environment.wait_timeout import duration, engine_timeout, set_timeout, timeout_seconds


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "")  # so that what a test sets is taken back


def test_without_a_word_it_is_half_an_hour_and_torchs_groups_keep_theirs() -> None:
    assert timeout_seconds() == 1800
    assert engine_timeout() is None


@pytest.mark.parametrize(("text", "seconds"), [("3600", 3600), ("0.5", 0.5), ("inf", inf), ("1e3", 1000)])
def test_the_variable_is_in_seconds(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", text)
    assert timeout_seconds() == seconds
    asked = engine_timeout()
    assert asked is not None
    assert asked.total_seconds() == min(seconds, timedelta(days=3650).total_seconds())


@pytest.mark.parametrize("text", ["0", "-5", "nan", "ten", "30min", "-inf"])
def test_a_variable_that_is_no_time_is_refused_with_the_line_to_write(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", text)
    for asked in (timeout_seconds, engine_timeout):
        with pytest.raises(ValueError, match=f"GOSSAMER_TIMEOUT={text} is not a number of seconds above 0.*=3600"):
            asked()


def test_a_command_prints_an_invalid_variable_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def wait() -> None:
        timeout_seconds()

    monkeypatch.setenv("GOSSAMER_TIMEOUT", "1h")
    monkeypatch.setattr(main, "gossamer", wait)
    monkeypatch.setattr(sys, "argv", ["gossamer"])
    with pytest.raises(SystemExit) as ended:
        main.run_command()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Error: GOSSAMER_TIMEOUT=1h is not a number")


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(timedelta(minutes=45), 2700), (timedelta(milliseconds=1), 0.001), (timedelta.max, inf)]
)
def test_the_argument_has_a_unit_and_outweighs_the_variable(
    monkeypatch: pytest.MonkeyPatch, timeout: timedelta, seconds: float
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "7")
    set_timeout(timeout)
    assert timeout_seconds() == seconds


@pytest.mark.parametrize("timeout", [30, 1800.0, "30 min"])
def test_an_argument_without_a_unit_is_refused(timeout: object) -> None:
    with pytest.raises(TypeError, match=r"has no unit.*timeout=timedelta\(minutes=30\)"):
        set_timeout(timeout)  # type: ignore[arg-type]
    assert timeout_seconds() == 1800


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1)])
def test_an_argument_that_is_no_time_is_refused(timeout: timedelta) -> None:
    with pytest.raises(ValueError, match=r"timedelta\(minutes=30\).*GOSSAMER_TIMEOUT=inf"):
        set_timeout(timeout)
    assert timeout_seconds() == 1800


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.3, "0.3 s"), (90, "90 s"), (1800, "30 min"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said

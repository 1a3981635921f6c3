"""The terminal view says what matters, and nothing in it steers the terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console
from support.watched_runs import KINDS, by_speed, hostile, made

from gossamer.observe.telemetry import open_store
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.terminal_view import spark, watch_in_terminal


def shown(*runs: WatchedRun, terminal: bool = False) -> str:
    said = StringIO()
    watch_in_terminal(
        runs, Console(file=said, width=160, force_terminal=terminal, color_system=None), sleep=lambda _: None
    )
    return said.getvalue()


def test_a_crashed_run_names_the_first_failure_the_straggler_and_every_rank(tmp_path: Path) -> None:
    text = shown(made(tmp_path, KINDS["crashed"]))
    assert "rank 2: RuntimeError: out of memory" in text
    assert "it caused the end of ranks 0, 1, 3" in text
    assert "rank 1, computing" in text
    assert text.count("machine-") == 8


def test_parts_by_speed_are_shown_where_ranks_have_them(tmp_path: Path) -> None:
    text = shown(by_speed(tmp_path / "a"))
    assert all(part in text for part in ("75 %", "25 %", "20 local steps", "4 local steps"))
    assert "local steps" not in shown(made(tmp_path / "b", KINDS["finished"]))


def test_runs_side_by_side_and_one_without_a_store(tmp_path: Path) -> None:
    text = shown(made(tmp_path / "a", KINDS["finished"]), WatchedRun("1", tmp_path))
    assert "finished" in text
    assert "run.sqlite" in text


def test_steps_that_took_no_time_are_shown(tmp_path: Path) -> None:
    run = made(tmp_path, KINDS["finished"])
    db = open_store(run.store)
    with db:
        db.execute("UPDATE step SET seconds = 0, compute = 0, waiting = 0")
    db.close()
    assert "0 s a step" in shown(run)


def test_a_terminal_is_left_once_all_runs_have_ended(tmp_path: Path) -> None:
    assert "step 100" in shown(made(tmp_path, KINDS["finished"]), terminal=True)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    text = shown(hostile(tmp_path, metrics=3))
    assert "\x1b" not in text
    assert "<script>" in text


def test_spark_goes_from_the_least_to_the_greatest() -> None:
    assert spark([0.0, 7.0, 3.0]) == "▁█▄"
    assert spark([2.0, 2.0]) == "▁▁"
    assert spark([-1.7e308, 1.7e308]) == "▁█"

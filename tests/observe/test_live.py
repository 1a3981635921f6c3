from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.events import Attached, RecipeSwitched, StepEnded
from gossamer.observe import live
from gossamer.observe.event_log import LiveLines, live_path
from gossamer.observe.live import LiveView, Progress

ATTACHED = {"kind": "attached", "recipe": "Dense()", "workers": 2, "parameters": 3, "period": 1}


def step(number: int, seconds: float, **metrics: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "steps_made": number,
        "seconds": seconds,
        "step_seconds": 0.1 * number,
        "waiting_seconds": 0.025 * number,
        "bytes_sent": 40_100.0 * number,
        "metrics": metrics,
    }


def said(*lines: dict[str, Any]) -> str:
    progress = Progress()
    for line in lines:
        progress.take(line)
    return str(progress)


def test_one_line_reports_where_the_run_is() -> None:
    assert said() == "starting"
    assert said(ATTACHED) == "starting"
    assert said(ATTACHED, step(1, 0.5)) == "step 1 · 40.1 kB/step · 25 % waiting · 0 s"
    lines = [step(10, 1.0, loss=2.0), step(30, 3.0, loss=1.5)]
    assert said(ATTACHED, *lines) == "step 30 · 10.0 steps/s · loss 1.50 · 40.1 kB/step · 25 % waiting · 3 s"
    assert "loss nan" in said(ATTACHED, step(1, 1.0, loss="nan"))


def test_local_steps_have_the_mean_bytes_of_whole_periods() -> None:
    told: list[dict[str, Any]] = []
    tell = LiveLines(told.append)
    tell(Attached(recipe="", layouts=(), parameters=0, buffer_bytes=0, control_bytes=0, rank=0, world=2, period=50))
    for number in range(1, 400):
        sent = 5000.0 if number % 50 == 0 else 0.0
        waiting = 0.5 if sent else 0.0
        tell(StepEnded(moment=number, step=number, seconds=1.0, waiting_seconds=waiting, bytes_sent=sent))
        if number == 25:
            assert " · 0 B/step · " in said(*told)
        if number >= 50:
            assert " · 100 B/step · 1.0 % waiting · " in said(*told)
    tell(RecipeSwitched(step=399, before="", after="", period=1))
    for number in range(400, 500):
        tell(StepEnded(moment=number, step=number, seconds=1.0))
    assert " · 0 B/step · " in said(*told)


def test_line_has_the_time_that_is_left_where_the_number_of_steps_is_known() -> None:
    lines = [step(10, 1.0), step(30, 3.0)]
    known = {**ATTACHED, "steps": 630}
    assert said(known, *lines) == "step 30 of 630 · 10.0 steps/s · 40.1 kB/step · 25 % waiting · 3 s, 60 s left"
    assert said(known, lines[0]).startswith("step 10 of 630 · ")
    assert "left" not in said(known, lines[0])
    assert "of 20" not in said({**ATTACHED, "steps": 20}, *lines)  # more than were announced


def test_line_names_the_time_since_the_last_step_if_it_is_unusually_long() -> None:
    now = [0.0]
    for seconds_per_step, usual in ((0.1, 5), (30.0, 150)):
        progress = Progress(clock=lambda: now[0])
        for number in (10, 30):
            progress.take(step(number, number * seconds_per_step))
        now[0] += usual
        assert "no step" not in str(progress)
        now[0] += 1
        assert str(progress).endswith(f" · no step for {'6 s' if usual == 5 else '2 min 31 s'}")
        progress.take(step(31, now[0]))
        assert "no step" not in str(progress)


def test_where_workers_come_and_go_the_line_reports_how_many_are_there(tmp_path: Path) -> None:
    view = LiveView(tmp_path, range(1))
    live_path(tmp_path, 2).write_text(json.dumps(step(7, 1.0)) + "\n")
    view.look()
    assert str(view.progress) == "starting"
    view.staff(2, 3)
    view.look()
    assert str(view.progress).startswith("2 workers · step 7 · ")
    view.staff(1, 3)
    assert str(view.progress).startswith("1 worker · step 7 · ")


def test_before_the_first_step_the_line_says_what_is_awaited(tmp_path: Path) -> None:
    where = ["1 of 2 joined"]

    class Starting:
        def __str__(self) -> str:
            return where[-1]

    view = LiveView(tmp_path, [0], Starting())
    assert str(view.progress) == "1 of 2 joined"
    view.progress.take(ATTACHED)
    where.append("2 of 2 attached")
    assert str(view.progress) == "2 of 2 attached"
    view.progress.take(step(1, 0.5))
    assert str(view.progress).startswith("step 1")


def check_somebody_who_trains_is_shown(silent_seconds: float) -> None:
    now = [0.0]
    progress = Progress(clock=lambda: now[0])

    def shown(rank: int, number: int) -> str:
        progress.take(step(number, now[0] - 100.0 * rank), rank)
        return str(progress).partition(" · ")[0]

    for rank in range(3):
        progress.take(ATTACHED, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "SILENT_SECONDS", silent_seconds)
        assert [shown(0, 50), shown(1, 40), shown(2, 30)] == ["step 50"] * 3
        now[0] = 1.0
        assert shown(1, 41) == "step 50"
        now[0] = 3.5
        assert [shown(2, 33), shown(1, 45)] == ["step 33", "step 45"]  # rank 0 was lost
        now[0] = 99.0  # all wait for a server
        assert str(progress).startswith("step 45")
        progress.take(ATTACHED, 0)
        assert [shown(0, 1), shown(2, 60)] == ["step 1", "step 60"]


def test_whoever_is_furthest_of_those_that_train_is_shown() -> None:
    check_somebody_who_trains_is_shown(2.0)


def test_the_check_of_who_is_shown_notices_one_who_was_lost() -> None:
    with pytest.raises(AssertionError):
        check_somebody_who_trains_is_shown(float("inf"))


def test_rates_are_of_one_worker() -> None:
    progress = Progress(attached=ATTACHED)
    for number in (10, 30):
        for rank in range(2):
            progress.take(step(number - rank, number / 10 + 7 * rank), rank)
    assert "step 30 · 10.0 steps/s" in str(progress)


def test_what_every_rank_says_is_shown_once(tmp_path: Path) -> None:
    skipped = {"kind": "skipped", "step": 3, "rank": 1, "tensor": "head"}
    for rank in range(2):
        lines = [{"kind": "noticed", "message": "beware"}, skipped, {"kind": "saved", "step": 3, "directory": "d"}]
        live_path(tmp_path, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    view = LiveView(tmp_path, range(2))
    notice, step_skipped = view.look()
    assert notice == "beware"
    assert "Step 3 was skipped" in step_skipped
    assert "'head'" in step_skipped
    assert view.look() == []
    assert view.progress.checkpoint is not None
    assert view.progress.checkpoint["directory"] == "d"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_that_skips_without_a_scaler_hears_how_to_give_one(scaled: bool) -> None:
    said = Progress().take({"kind": "skipped", "step": 3, "rank": 1, "tensor": "head", "scaled": scaled})
    assert said is not None
    assert said.endswith("With a GradScaler write attach(..., scaler=scaler).") is not scaled


def test_lines_still_being_written_wait_and_a_file_that_began_again_is_read_again(tmp_path: Path) -> None:
    path, view = live_path(tmp_path, 0), LiveView(tmp_path, [0])
    assert view.look() == []
    text = json.dumps({"kind": "noticed", "message": "one"}) + "\n"
    path.write_text(text + text[:9])
    assert view.look() == ["one"]
    path.write_text(text + text.replace("one", "two"))
    assert view.look() == ["two"]
    path.write_text(text.replace("one", "6"))
    assert view.look() == ["6"]


def test_a_file_that_began_again_and_is_longer_already_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, view = live_path(tmp_path, 0), LiveView(tmp_path, [0])
    path.write_text(json.dumps({"kind": "noticed", "message": "before"}) + "\n")
    assert view.look() == ["before"]
    lines = [json.dumps({"kind": "noticed", "message": f"{number} of the worker that came back"}) for number in (1, 2)]
    path.write_text("\n".join(lines) + "\n")
    assert view.look() == ["1 of the worker that came back", "2 of the worker that came back"]

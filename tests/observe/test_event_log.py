"""Event logs: in batches, torn by a kill, on a disk that is full."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.events import Attached, Closed, Event, LeftRun, Logged, Saved, StepEnded, TensorCost, TensorsMeasured
from gossamer.observe.event_log import PENDING_BYTES, Entry, EventLog, LineFile, read_entries

ATTACHED = Attached(
    moment=0.0, recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=1
)


def step(number: int, moment: float) -> StepEnded:
    return StepEnded(moment=moment, step=number, seconds=0.01, bytes_sent=8.0)


def kinds(*events: Event) -> list[str]:
    entries: list[Entry] = []
    log = EventLog(entries.append)
    for event in events:
        log(event)
    return [entry["kind"] for entry in entries]


def test_the_first_ten_steps_have_a_line_each_and_then_a_second_has_one() -> None:
    said = kinds(ATTACHED, *(step(number, number / 100) for number in range(1, 516)))
    assert said == ["attached", *["steps"] * 10, *["steps"] * 5]


def test_what_is_rare_comes_at_once_and_after_what_was_before() -> None:
    early = [step(number, number / 100) for number in range(1, 13)]
    saved, closed = (
        Saved(moment=0.2, step=12, directory="x"),
        Closed(steps=12, digest="", residual_bytes=0, bucket_bytes=0),
    )
    assert kinds(ATTACHED, *early, saved, closed)[11:] == ["steps", "saved", "closed"]


def test_a_rank_that_leaves_reports_it_after_the_steps_before() -> None:
    steps = [step(number, number / 100) for number in range(1, 13)]
    assert kinds(ATTACHED, *steps, LeftRun())[11:] == ["steps", "left"]


def test_a_week_is_bounded(tmp_path: Path) -> None:
    """Two steps a second with a loss each: a thousandth of a week, a thousandth of 100 MB."""
    file = LineFile(tmp_path / "events", pytest.fail)
    log = EventLog(file.append)
    log(ATTACHED)
    for number in range(1, 1210):
        moment = number * 0.5
        log(StepEnded(moment=moment, step=number, seconds=0.5 + 1e-9 * number, wire_seconds=0.1 / 3, bytes_sent=123456))
        log(Logged(moment=moment, step=number, values={"loss": 1 / number}))
    file.close()
    assert (tmp_path / "events").stat().st_size < 2**18


def numbered(path: Path) -> list[int]:
    return [entry["number"] for entry in read_entries(path)]


def test_a_torn_line_is_passed_over_and_the_next_start_continues_below_it(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{"number": 1}\n{"number": 2}\n{"numb')
    assert numbered(path) == [1, 2]
    file = LineFile(path, pytest.fail)
    file.append({"number": 3})
    file.close()
    assert numbered(path) == [1, 2, 3]


def test_lines_are_there_before_the_file_is_closed(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "events", pytest.fail)
    file.append({"number": 1})
    assert numbered(tmp_path / "events") == [1]
    file.close()


def test_a_line_of_a_signal_handler_repeats_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write, handled = LineFile(tmp_path / "events", pytest.fail), os.write, []

    def interrupted(number: int, data: bytes) -> int:
        written = write(number, data)
        if not handled:
            handled.append(True)
            file.append({"number": 2})
        return written

    monkeypatch.setattr(os, "write", interrupted)
    for number in (1, 3):
        file.append({"number": number})
    file.close()
    assert numbered(tmp_path / "events") == [1, 2, 3]


def test_a_full_disk_is_reported_once_and_nothing_is_lost_when_there_is_room_again(
    tmp_path: Path, room: Callable[[int | None], None]
) -> None:
    said: list[str] = []
    file = LineFile(tmp_path / "events", said.append)
    room(20)
    for number in range(10):
        file.append({"number": number})
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "Training continues" in said[0]
    assert numbered(tmp_path / "events") == [0]
    room(None)
    file.append({"number": 10})
    file.close()
    assert numbered(tmp_path / "events") == list(range(11))


def test_a_disk_that_stays_full_does_not_fill_the_memory(tmp_path: Path, room: Callable[[int | None], None]) -> None:
    file = LineFile(tmp_path / "events", lambda sentence: None)
    room(0)
    for _ in range(3):
        file.append({"text": "x" * PENDING_BYTES})
    assert file._pending == b""
    file.close()


def test_a_restarted_worker_continues_or_begins_again(tmp_path: Path) -> None:
    for truncate, expected in ((False, [1, 1]), (True, [1])):
        for _ in range(2):
            file = LineFile(tmp_path / str(truncate), pytest.fail, truncate=truncate)
            file.append({"number": 1})
            file.close()
        assert numbered(tmp_path / str(truncate)) == expected


def test_norms_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    cost = TensorCost(
        name="w", numel=2, bytes=8.0, residual_norm=float("inf"), gradient_norm=float("nan"), energy_share=0.5
    )
    file = LineFile(tmp_path / "events-0.jsonl", pytest.fail)
    log = EventLog(file.append)
    for event in (ATTACHED, TensorsMeasured(step=1, tensors=(cost,))):
        log(event)
    file.close()
    *_, told = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "events-0.jsonl").read_text().splitlines()
    ]
    assert (told["tensors"][0]["residual_norm"], told["tensors"][0]["gradient_norm"]) == (None, None)

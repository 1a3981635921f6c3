"""Aside log: notices, warnings, errors of threads and changes of the group, with their moments, each as it comes."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest

from gossamer import events
from gossamer.base import flight_recorder
from gossamer.base.flight_recorder import FlightRecorder
from gossamer.events import GroupChanged, Noticed, Skipped, StepEnded
from gossamer.observe.aside_log import MOST_WARNINGS, Aside, AsideLog, aside_log_path, watch_threads, watch_warnings
from gossamer.observe.event_log import Entry, read_entries


def test_what_no_record_has_is_told_with_its_moment() -> None:
    told: list[Entry] = []
    log = AsideLog(told.append, clock=lambda: 12.5)
    log(Noticed(message="slow"))
    log(Skipped(step=3, rank=1, tensor="head"))
    log(GroupChanged(step=4, view=2, world=3, lost=(1,), joined=0, seconds=0.5, finished=True))
    log(StepEnded(step=4, seconds=1.0))
    log.vitals({"rss": 1.0})
    assert [entry["kind"] for entry in told] == ["noticed", "skipped", "group changed", "vitals"]
    assert {entry["moment"] for entry in told} == {12.5}
    assert json.loads(json.dumps(told[2]))["lost"] == [1]


def test_a_loop_that_warns_in_every_step_fills_no_disk() -> None:
    told: list[Entry] = []
    log = AsideLog(told.append)
    for _ in range(2 * MOST_WARNINGS):
        log.warned("UserWarning", "again", "train.py:3")
    assert len(told) == MOST_WARNINGS


def test_warnings_are_told_and_shown_as_before() -> None:
    told: list[tuple[str, str, str]] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        end = watch_warnings(lambda *warned: told.append(warned))
        warnings.warn("careful", UserWarning, stacklevel=1)
        end()
        warnings.warn("unheard", UserWarning, stacklevel=1)
    assert [(category, message) for category, message, _ in told] == [("UserWarning", "careful")]
    assert "test_aside_log.py:" in told[0][2]
    assert [str(each.message) for each in shown][-1] == "unheard"


def test_an_error_that_ends_a_thread_is_told_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    told: list[Entry] = []
    end = watch_threads(AsideLog(told.append).failed)

    def fail() -> None:
        raise RuntimeError("lost")

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    end()
    assert len(shown) == 1
    assert (told[0]["thread"], told[0]["summary"]) == ("loader", "RuntimeError: lost")
    assert "in fail" in told[0]["traceback"]


def test_a_worker_tells_of_itself_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "current", FlightRecorder())
    aside = Aside(tmp_path, 3)
    events.emit(Noticed(message="here"))
    aside.close()
    events.emit(Noticed(message="unheard"))
    told = list(read_entries(aside_log_path(tmp_path, 3)))
    assert [entry["kind"] for entry in told] == ["environment", "noticed", "vitals"]
    assert "torch" in told[0]["versions"]
    assert told[2]["values"]["rss"] > 0

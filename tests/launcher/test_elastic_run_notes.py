"""What a coordinator says is said a second later, or not at all."""

from __future__ import annotations

import pytest

from gossamer.launcher import elastic_run
from gossamer.launcher.elastic_run import NOTE_DELAY_SECONDS, DelayedNotes


def check_ends_are_no_news(notes: DelayedNotes, said: list[str], now: list[float]) -> None:
    notes("worker 1 is out")
    now[0] += NOTE_DELAY_SECONDS / 2
    notes("worker 2 is out")
    over = [False]
    notes.look(now[0], lambda: over[0])
    assert not said
    now[0] += NOTE_DELAY_SECONDS / 2
    notes.look(now[0], lambda: over[0])
    assert said == ["worker 1 is out"]
    over[0] = True
    notes.look(now[0] + 10.0, lambda: over[0])
    assert said == ["worker 1 is out"], "by then the launcher knew that the run was finished"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(elastic_run.time, "monotonic", lambda: now[0])
    return now


def test_what_was_said_as_the_workers_finished_is_dropped(now: list[float]) -> None:
    said: list[str] = []
    check_ends_are_no_news(DelayedNotes(said.append), said, now)


def test_the_check_of_delays_detects_a_mutant_that_says_all_at_once(now: list[float]) -> None:
    class Hasty(DelayedNotes):
        def __call__(self, text: str) -> None:
            self._note(text)

    said: list[str] = []
    with pytest.raises(AssertionError):
        check_ends_are_no_news(Hasty(said.append), said, now)

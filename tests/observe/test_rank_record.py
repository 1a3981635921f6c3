"""Rank records: what an event log adds up to, whatever ended it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gossamer.events import Attached, Closed, Event, LeftRun, Logged, ResidualMeasured, StepEnded, TensorsMeasured
from gossamer.observe.event_log import Entry, EventLog
from gossamer.observe.rank_record import RankRecord, replay, warm_up


def attached(moment: float = 100.0) -> Attached:
    return Attached(
        moment=moment, recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=1
    )


def training(steps: int, began: float = 100.0, seconds: float = 0.25, first: int = 1) -> Iterator[Event]:
    yield attached(began)
    for step in range(first, steps + 1):
        moment = began + (step - first + 1) * seconds
        yield StepEnded(moment=moment, step=step, seconds=seconds, waiting_seconds=seconds / step, bytes_sent=8 * step)
        yield Logged(moment=moment, step=step, values={"loss": 1 / step})


def logged(*events: Event, ends: bool = False) -> list[Entry]:
    entries: list[Entry] = []
    log = EventLog(entries.append)
    for event in events:
        log(event)
    if ends:
        log.end()
    return entries


def record(entries: list[Entry]) -> RankRecord:
    found = replay(entries)
    assert found is not None
    return found


@pytest.mark.parametrize(("steps", "left_out"), [(0, 0), (4, 0), (5, 1), (49, 9), (50, 10), (1000, 10)])
def test_warm_up(steps: int, left_out: int) -> None:
    assert warm_up(steps) == left_out


@pytest.mark.parametrize("steps", [1, 4, 10, 11, 49, 50, 200])
def test_means_over_batches_are_means_over_the_steps_after_the_warm_up(steps: int) -> None:
    found = record(logged(*training(steps), ends=True))
    kept = range(warm_up(steps) + 1, steps + 1)
    assert found.waiting_seconds == pytest.approx(sum(0.25 / step for step in kept) / len(kept))
    assert found.bytes_sent == pytest.approx(8 * (steps + 1) / 2)
    assert (found.steps, found.median_seconds, len(found.metrics["loss"])) == (steps, 0.25, steps)
    assert found.complete


def test_after_a_kill_everything_but_the_last_second_is_there() -> None:
    """Steps of a quarter second, and never a word about the end."""
    found = record(logged(*training(103)))
    assert 99 <= found.steps <= 103
    assert [step for step, _, _ in found.metrics["loss"]][:99] == list(range(1, 100))
    assert found.seconds >= 103 / 4 - 1
    assert not found.complete


@pytest.mark.parametrize("steps", [41, 43, 160])
def test_a_resumed_session_tells_where_it_continued(steps: int) -> None:
    found = record(logged(*training(steps, first=41), ends=True))
    assert (found.resumed_at, found.steps, found.seconds) == (40, steps, (steps - 40) / 4)
    assert record(logged(*training(3))).resumed_at == 0


def test_slow_steps_are_there_at_once() -> None:
    found = record(logged(*training(30, seconds=20.0)))
    assert (found.steps, found.metrics["loss"][-1][0]) == (30, 30)


def test_a_worker_that_was_restarted_is_complete_by_its_last_session_alone() -> None:
    first, ended = logged(*training(20, seconds=2.0)), logged(*training(5, began=500.0), ends=True)
    again = record([*first, *ended])
    assert (again.steps, again.complete) == (5, True)
    too_late = record([*first, *logged(attached(500.0), ends=True)])
    assert (too_late.steps, too_late.complete) == (20, False)
    assert not record([*logged(*training(5), ends=True), *logged(attached(500.0))]).complete
    failed = [*ended[:-1], {**ended[-1], "failed": True}]
    assert not record(failed).complete, "it was put out, or failed alone: the others' end was not its own"
    assert record([*failed, *ended]).complete


def test_the_last_that_a_lost_start_told_of_its_residual_stays_known() -> None:
    def told(*norms: float, began: float = 100.0) -> list[Event]:
        first, *steps = training(3 * len(norms), began=began)
        parts = (
            [*steps[6 * n : 6 * n + 6], ResidualMeasured(step=3 * n + 3, norm=each)] for n, each in enumerate(norms)
        )
        return [first, *(event for part in parts for event in part)]

    closed = Closed(steps=3, digest="d", residual_bytes=1, bucket_bytes=1)
    killed, closes, leaves = logged(*told(0.5, 0.25)), logged(*told(3.0), closed), logged(*told(2.0), closed, LeftRun())
    found = record([*killed, *closes, *leaves, *logged(*told(1.0, began=500.0), ends=True)])
    assert found.lost_residuals == ({"norm": 0.25, "step": 6}, {"norm": 2.0, "step": 3})
    assert found.residual == {"norm": 1.0, "step": 3}
    assert record(killed).residual == {"norm": 0.25, "step": 6}
    assert (record(killed).lost_residuals, record(killed).steps) == ((), 6)


def test_a_session_that_was_not_closed_has_no_hashes_of_a_final_model() -> None:
    found = record(logged(*training(3), TensorsMeasured(step=3, tensors=()), ends=True))
    assert (found.tensors, found.steps, found.digest) == ({}, 3, None)


def test_sessions_that_are_open_at_the_same_time_are_counted() -> None:
    closed = Closed(steps=3, digest="d", residual_bytes=1, bucket_bytes=1)
    in_turn = logged(*training(3), closed, *training(3, began=500.0), closed, ends=True)
    assert (record(in_turn).sessions, record(in_turn).steps) == (1, 3)
    first, *steps = training(3)
    at_once = logged(attached(), first, *steps, closed, closed, ends=True)
    assert record(at_once).sessions == 2
    assert record(logged(*training(3))).sessions == 1, "killed"


def test_what_was_said_before_a_session_is_no_session() -> None:
    closed = Closed(steps=1, digest="d", residual_bytes=1, bucket_bytes=1)
    assert logged(Logged(step=1, values={"loss": 1.0}), *list(training(1))[1:], closed, ends=True) == []
    entries: list[Any] = [{"kind": "logged", "points": [[1, 0.1, {"loss": 1.0}]]}, {"kind": "end"}]
    assert replay(entries) is None

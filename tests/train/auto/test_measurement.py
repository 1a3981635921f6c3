"""Slowdowns: a line that breaks down between two looks, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from support.virtual_ladder import VirtualJob

from gossamer.train.auto import decision
from gossamer.train.auto.measurement import Measurement, StepSeconds, asks_for_look, slow_steps


def drop_at(second: float, until: float = inf) -> Callable[[float], str]:
    return lambda now: "10mbit,1ms" if second <= now < until else "10gbit,0.1ms"


def steps_after_the_drop(**job: Any) -> int:
    """That are made with the old rung on the slow line, at most, wherever between two looks it begins."""
    return max(_steps_after(30.0 + place, **job) for place in range(6))


def _steps_after(drop: float, **job: Any) -> int:
    falls = VirtualJob(drop_at(drop), told=dear_looks, **job)
    while not falls.changes:
        falls.make_step()
    return sum(second > drop for second, _, _ in falls.history)


def dear_looks(step: int, measurements: list[Measurement]) -> list[Measurement]:
    return [replace(each, look_seconds=0.02) for each in measurements]


def test_a_line_that_breaks_down_is_answered_at_once() -> None:
    # Two tell of it; before them one was under way, and one may have been the last before a look that came by itself
    assert steps_after_the_drop() <= 4


def test_the_mutant_that_does_not_ask_waits_for_its_next_look() -> None:
    assert steps_after_the_drop(asking=False) > 10


def test_the_mutant_that_counts_steps_of_the_rung_in_force_stays_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_steps(rule, state, here, prices, target, step):
        return rule.change_steps * prices[state.rung].step_seconds

    monkeypatch.setattr(decision, "change_cost", in_steps)
    assert steps_after_the_drop() > 5


def test_one_slow_step_changes_nothing() -> None:
    """A hiccup is over when all look."""
    job = VirtualJob(drop_at(30.0, until=30.4)).run(seconds=60)
    assert max(after - before for (before, *_), (after, *_) in pairwise(job.history)) > 2.0
    assert not job.changes


def test_who_computes_long_asks_for_nothing_and_who_waits_long_does() -> None:
    usual, evaluates, waits = (
        StepSeconds(0.2, 0.1, 0.1, 0.0),
        StepSeconds(9.0, 0.1, 0.1, 0.0),
        StepSeconds(1, 0.8, 0.8, 0.0),
    )
    assert not asks_for_look([usual] * 9 + [evaluates], 0.2)
    assert not asks_for_look([usual] * 9 + [waits], None)  # nobody knows yet what is usual
    assert not asks_for_look([usual] * 9 + [waits, usual], 0.2)
    assert asks_for_look([usual] * 9 + [waits], 0.2)
    assert not slow_steps([usual] * 9 + [waits], 0.2)
    assert slow_steps([usual] * 9 + [waits] * 3, 0.2) == [waits] * 3
    assert slow_steps([waits] * 3, 0.2) == [waits] * 3


def test_stragglers_that_come_and_go_ask_for_no_more_looks_than_they_may_take() -> None:
    """Every fifth step one rank is late, so that the others wait."""
    asked = VirtualJob(lambda second: "10gbit,0.1ms", told=dear_looks)
    looks = 0
    for step in range(400):
        asked.slowed = 2.0 if step % 5 == 4 else 0.0
        before = asked.state.looked_at
        asked.make_step()
        looks += asked.state.looked_at != before
    assert not asked.changes
    assert looks * 0.02 <= 0.03 * asked.seconds

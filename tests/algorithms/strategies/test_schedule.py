"""Schedules of sync rounds, as literal tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.algorithms.strategies import (
    AveragingStage,
    DelayedAveraging,
    DiLoCo,
    EveryStep,
    Gossip,
    GossipStage,
    GradientStage,
    LocalSGD,
    ParameterServer,
    PeriodicSchedule,
    PostLocalSGD,
    ServerStage,
    Stage,
    Strategy,
    SyncRound,
)

TABLES = [
    (PeriodicSchedule(6, fragments=3, delay=1), 9, [(0, 2, 3), (1, 4, 5), (2, 6, 7), (0, 8, 9)]),
    (PeriodicSchedule(1), 3, [(0, 1, 1), (0, 2, 2), (0, 3, 3)]),
    (PeriodicSchedule(4), 11, [(0, 4, 4), (0, 8, 8)]),
    (PeriodicSchedule(1, delay=3), 3, [(0, 1, 4), (0, 2, 5), (0, 3, 6)]),
    (PeriodicSchedule(3, delay=5), 9, [(0, 3, 8), (0, 6, 11), (0, 9, 14)]),
    (PeriodicSchedule(3, fragments=3), 4, [(0, 1, 1), (1, 2, 2), (2, 3, 3), (0, 4, 4)]),
    (
        PeriodicSchedule(5, fragments=3, delay=2),
        10,
        [(0, 1, 3), (1, 3, 5), (2, 5, 7), (0, 6, 8), (1, 8, 10), (2, 10, 12)],
    ),
    (PeriodicSchedule(7, fragments=2), 14, [(0, 3, 3), (1, 7, 7), (0, 10, 10), (1, 14, 14)]),
    (PeriodicSchedule(7, fragments=4, delay=1), 7, [(0, 1, 2), (1, 3, 4), (2, 5, 6), (3, 7, 8)]),
    (PeriodicSchedule(8), 7, []),
]


@pytest.mark.parametrize(("schedule", "passes", "table"), TABLES, ids=lambda value: str(value)[:50])
def test_plans_are_these_tables(schedule: PeriodicSchedule, passes: int, table: list[tuple[int, int, int]]) -> None:
    assert list(schedule.rounds_until(passes)) == table
    assert schedule.period_rounds == tuple(SyncRound(*each) for each in schedule.rounds_until(schedule.period))


def check_turns(schedule: PeriodicSchedule, passes: int = 60) -> None:
    """Every fragment exactly once in every period, as evenly as whole passes allow, each `delay` passes on its way."""
    turns = list(schedule.rounds_until(passes))
    for first in range(passes - schedule.period + 1):
        window = Counter(turn.fragment for turn in turns if first < turn.launch <= first + schedule.period)
        assert window == dict.fromkeys(range(schedule.fragments), 1), f"after {first} passes: {window}"
    gaps = {late.launch - early.launch for early, late in pairwise(turns)}
    assert max(gaps) - min(gaps) <= 1, f"between launches there are {gaps} passes"
    assert {turn.landing - turn.launch for turn in turns} == {schedule.delay}


@st.composite
def schedules(draw: st.DrawFn) -> PeriodicSchedule:
    period = draw(st.integers(1, 20))
    return PeriodicSchedule(period, draw(st.integers(1, period)), draw(st.integers(0, 9)))


@given(schedules())
def test_every_fragment_has_its_turn_once_a_period(schedule: PeriodicSchedule) -> None:
    check_turns(schedule)


@dataclass(frozen=True)
class Crowded(PeriodicSchedule):
    """Whole passes between sync rounds, and the rest of the period silent."""

    def sync_round(self, number: int) -> SyncRound:
        periods, fragment = divmod(number, self.fragments)
        launch = periods * self.period + (fragment + 1) * (self.period // self.fragments)
        return SyncRound(fragment, launch, launch + self.delay)


@dataclass(frozen=True)
class Drifting(PeriodicSchedule):
    """Sync rounds so many passes apart, whatever the period is."""

    def sync_round(self, number: int) -> SyncRound:
        launch = (number + 1) * (self.period // self.fragments)
        return SyncRound(number % self.fragments, launch, launch + self.delay)


@pytest.mark.parametrize("twin", [Crowded(11, 3), Drifting(5, 3)])
def test_the_check_catches_uneven_and_drifting_turns(twin: PeriodicSchedule) -> None:
    check_turns(PeriodicSchedule(twin.period, twin.fragments))
    with pytest.raises(AssertionError, match="passes"):
        check_turns(twin)


STAGES: list[tuple[Strategy, tuple[Stage, ...]]] = [
    (EveryStep(), (GradientStage(0),)),
    (EveryStep(accumulate=4), (GradientStage(0, accumulate=4),)),
    (EveryStep(delay=2), (GradientStage(0, delay=2),)),
    (LocalSGD(4), (AveragingStage(0, LocalSGD(4)),)),
    (LocalSGD(4, per_site=2), (AveragingStage(0, LocalSGD(4, per_site=2), per_site=2),)),
    (PostLocalSGD(4, start=10), (GradientStage(0), AveragingStage(10, LocalSGD(4)))),
    (
        PostLocalSGD(4, start=1, optimizer_state="reset"),
        (GradientStage(0), AveragingStage(1, LocalSGD(4, optimizer_state="reset"))),
    ),
    (DiLoCo(9), (AveragingStage(0, DiLoCo(9)),)),
    (DelayedAveraging(3), (AveragingStage(0, DelayedAveraging(3)),)),
    (Gossip(period=2), (GossipStage(0, Gossip(period=2)),)),
    (ParameterServer(), (ServerStage(0, ParameterServer()),)),
]


@pytest.mark.parametrize(("strategy", "stages"), STAGES, ids=lambda value: str(value)[:40])
def test_what_continues_and_from_when(strategy: Strategy, stages: tuple[Stage, ...]) -> None:
    assert strategy.stages == stages


def test_the_schedules_of_strategies() -> None:
    assert LocalSGD(4).schedule == PeriodicSchedule(4)
    assert DiLoCo(9, fragments=3, delay=2).schedule == PeriodicSchedule(9, fragments=3, delay=2)
    assert DelayedAveraging(delay=3, period=2).schedule == PeriodicSchedule(2, delay=3)


def test_a_plan_is_lazy() -> None:
    assert [turn.launch for turn in islice(PeriodicSchedule(1).rounds_until(10**12), 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: EveryStep(accumulate=0), "passes, 1 or more, got 0"),
        (lambda: EveryStep(delay=-1), "steps, 0 or more, got -1"),
        (lambda: EveryStep(accumulate=2, delay=1), r"Write EveryStep\(accumulate=2\) or EveryStep\(delay=1\)"),
        (lambda: LocalSGD(0), "1 or more, got 0"),
        (lambda: LocalSGD(4, per_site=1), "2 or more, got 1"),
        (lambda: LocalSGD(4, optimizer_state="forget"), "optimizer_state must be .*forget"),
        (lambda: PostLocalSGD(4, start=0), "1 or more, got 0"),
        (lambda: PostLocalSGD(0, start=3), "1 or more, got 0"),
        (lambda: PostLocalSGD(4, start=3, optimizer_state=""), "optimizer_state must be"),
        (lambda: DiLoCo(0), "1 or more, got 0"),
        (lambda: DiLoCo(4, fragments=5), "Write fragments=4"),
        (lambda: DiLoCo(4, fragments=0), "fragments"),
        (lambda: DiLoCo(4, delay=4), "Write delay=3"),
        (lambda: DiLoCo(4, mix=1.5), r"\[0, 1\]"),
        (lambda: DiLoCo(4, outer_momentum=1.0), r"\[0, 1\)"),
        (lambda: DiLoCo(4, outer_learning_rate=-0.1), "0 or more, got -0.1"),
        (lambda: DiLoCo(4, optimizer_state="none"), "optimizer_state must be"),
        (lambda: DelayedAveraging(delay=-1), "0 or more, got -1"),
        (lambda: DelayedAveraging(delay=1, period=0), "1 or more, got 0"),
    ],
)
def test_arguments_out_of_range(strategy: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy()  # type: ignore[operator]

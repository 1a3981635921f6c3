"""Pipeline tuning in virtual time: how many buckets travel at once, on every rank alike, and never a loss for long."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from laws.laws import in_threads
from torch import nn

from gossamer.algorithms.compressors import PowerSGD
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout
from gossamer.base.ops import AllGather, CollectiveOp
from gossamer.base.runner import simulate
from gossamer.comm.network import read_network
from gossamer.comm.network.cost import op_cost
from gossamer.comm.network.cost.step_simulator import AnswerTimes, BucketJob, run_step
from gossamer.comm.runtime import pipeline
from gossamer.comm.runtime.pipeline import DEPTH, TRIAL_DEPTHS, TRIAL_PERIOD, PipelineTuner
from gossamer.comm.simulated import SimulatedGroup
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.train.engine.bucket import NO_INPUT, Bucket
from gossamer.train.engine.bucket_reduction import StepReduction, StepTrailer
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.step_decision import Presence, StepReport
from gossamer.train.traffic.op_trace import trace_ops

WORLD = 4
FIRST = pipeline.FIRST_TRIAL + len(TRIAL_DEPTHS)  # exchanges until the first comparison

# -- which exchange tries what -----------------------------------------------------------------------------------------

UNCHECKED = ParameterCheck(nn.Module(), {}, "off", rank=0)


def windows(tuner: Sequence[PipelineTuner], count: int, seconds: Callable[[int, int], float]) -> list[int]:
    """Of so many exchanges, which take seconds(number, window) on all ranks; all ranks have the same one."""
    found = []
    for number in range(count):
        (window,) = {each.window for each in tuner}
        found.append(window)
        for each in tuner:
            each.ended(seconds(number, window))
        compare(tuner)
    return found


def compare(tuner: Sequence[PipelineTuner]) -> None:
    (over,) = {each.over for each in tuner}
    if over:
        simulate([each.compare() for each in tuner])


@pytest.mark.parametrize(("faster", "kept"), [(1, 1), (2, 2)])
def test_the_windows_of_exchanges_are_a_table(faster: int, kept: int) -> None:
    found = windows([PipelineTuner()], TRIAL_PERIOD + 16, lambda number, window: 1.0 if window == faster else 1.5)
    assert found[:11] == [2, 2, 2, 1, 2, 2, 1, 1, 2, 2, 1]
    assert set(found[11:1003]) == {kept}
    assert found[1003:1011] == [1, 2, 2, 1, 1, 2, 2, 1]
    assert set(found[1011:]) == {kept}


def test_what_became_slower_is_left_at_the_next_trial() -> None:
    found = windows(
        [PipelineTuner()],
        2 * FIRST + TRIAL_PERIOD,
        lambda number, window: 1.0 + (window == 1) * (number < TRIAL_PERIOD) / 2,
    )
    assert found[FIRST] == 2
    assert found[-1] == 1


def test_of_two_that_take_as_long_the_simpler_is_kept() -> None:
    assert windows([PipelineTuner()], FIRST + 1, lambda number, window: 1.0)[-1] == 1


# -- every rank alike --------------------------------------------------------------------------------------------------


class ByItself(PipelineTuner):
    """Broken: hears everyone, and believes only itself."""

    def compare(self) -> Generator[AllGather, Any, None]:
        talk = super().compare()
        said = next(talk)
        yield said
        with suppress(StopIteration):
            talk.send([said.payload])


def check_alike(rule: type[PipelineTuner]) -> None:
    """Three ranks find two at once faster by 1 s, one slower by 4 s: together they lose."""
    tuner = [rule() for _ in range(WORLD)]
    for _ in range(FIRST):
        for rank, each in enumerate(tuner):
            each.ended(10.0 + (each.window == DEPTH) * (4.0 if rank == 2 else -1.0))
    compare(tuner)
    assert {each.window for each in tuner} == {1}


def test_ranks_that_disagree_keep_the_same() -> None:
    check_alike(PipelineTuner)


def test_a_rank_that_asks_nobody_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_alike(ByItself)


def test_a_rank_without_data_has_no_say() -> None:
    tuner = [PipelineTuner(), PipelineTuner()]
    for _ in range(FIRST):
        tuner[0].ended(1.0 if tuner[0].window == DEPTH else 2.0)
        tuner[1].ended(None)
    compare(tuner)
    assert [each.window for each in tuner] == [2, 2]


def test_where_nobody_has_data_all_stays_as_it_is() -> None:
    tuner = [PipelineTuner(), PipelineTuner()]
    for _ in range(FIRST):
        for each in tuner:
            each.ended(None)
    compare(tuner)
    assert [each.window for each in tuner] == [DEPTH, DEPTH]


# -- what it saves and costs, in virtual time --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    recipe: str
    buckets: int
    backward_seconds: float
    round_trip_seconds: float
    bits_per_second: float


CASES = [
    Case(
        recipe=recipe,
        buckets=buckets,
        backward_seconds=backward,
        round_trip_seconds=round_trip,
        bits_per_second=rate,
    )
    for recipe in ("Dense()", "PowerSGD(rank=2)", "Feedback(Sharded(Int8()))")
    for buckets in (2, 3, 6)
    for backward in (0.05, 0.2, 0.8, 3.2)
    for round_trip in (1e-4, 1e-3, 0.02, 0.08)
    for rate in (1e8, 1e9, 1e10)
]
CODEC_SECONDS = 0.03  # of a bucket of 25 MB


@dataclass
class OneLine:
    """Bytes leave one after the other, and are answered a round trip after the last of them, whatever else leaves."""

    case: Case
    free: float = 0.0

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        self.free = max(self.free, *starts) + 8 * ops[0].bytes_sent(WORLD) / self.case.bits_per_second
        return [self.free + self.case.round_trip_seconds] * len(starts)

    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]:
        raise AssertionError("nobody has buffers here")


@cache
def said(recipe: str) -> list[CollectiveOp]:
    """Of a bucket of 25 MB, in whose first op the control op travels along."""
    return trace_ops(resolve(recipe), Layout.of({"weight": (1024, 6400)}), torch.float32, WORLD, control_bytes=32)


def measured(case: Case) -> WorkloadProfile:
    rounds = len(said(case.recipe))
    ready = [case.backward_seconds * (1 + 2 * (place + 1) / case.buckets) / 3 for place in range(case.buckets)]
    buckets = [
        BucketProfile(
            dtype="float32",
            shapes={"weight": (1024, 6400)},
            ready_seconds=each,
            computing_seconds=[CODEC_SECONDS / (rounds + 1)] * (rounds + 1),
            engine_seconds=[0.0] * rounds,
        )
        for each in ready
    ]
    return WorkloadProfile(
        recipe=case.recipe,
        backward_seconds=case.backward_seconds,
        rest_seconds=0.05 * case.backward_seconds,
        buckets=buckets,
        control_bytes=32,
    )


def job(bucket: BucketProfile, ops: Sequence[CollectiveOp]) -> BucketJob:
    *before, last = bucket.computing_seconds
    rounds = list(zip(before, ops, bucket.engine_seconds, strict=True))
    return BucketJob(ready_seconds=bucket.ready_seconds, rounds=rounds, last_seconds=last)


def step(case: Case, lines: AnswerTimes, window: int) -> float:
    pace = measured(case)
    jobs = [job(bucket, said(case.recipe)) for bucket in pace.buckets]
    return run_step(jobs, pace, lines, [0.0] * WORLD, window).ends[0]


@cache
def step_seconds(case: Case, window: int) -> float:
    return step(case, OneLine(case), window)


def change(case: Case) -> float:
    """By what share a step becomes longer where two go on at once, instead of one after the other."""
    return step_seconds(case, DEPTH) / step_seconds(case, 1) - 1


def test_neither_window_is_the_better_one_everywhere() -> None:
    """Two at once cost an eighth at worst, and save more than half at best."""
    least, most = min(CASES, key=change), max(CASES, key=change)
    assert (change(least), change(most)) == pytest.approx((-0.559, 0.124), abs=0.001)
    assert most.round_trip_seconds < 0.01 < least.round_trip_seconds
    assert all(change(case) < 1e-9 for case in CASES if case.recipe == "Dense()")  # there is nothing to hold back


def test_lines_that_explain_foretells_with_say_so_too() -> None:
    """On 10 Gbit/s, with backward passes of 0.2 s: held back by the bucket that comes late."""
    case = Case(
        recipe="PowerSGD(rank=2)", buckets=3, backward_seconds=0.2, round_trip_seconds=1e-4, bits_per_second=1e10
    )
    one, two = (step(case, op_cost.NetworkCost(read_network("10gbit,100us", WORLD)), window) for window in (1, DEPTH))
    assert (one, two) == pytest.approx((step_seconds(case, 1), step_seconds(case, DEPTH)), rel=0.01)
    assert two / one == pytest.approx(1.124, abs=0.005)


class Always(PipelineTuner):
    """Broken: never tries."""

    always = DEPTH

    window = property(lambda self: self.always, lambda self, window: None)  # type: ignore[assignment]


class AlwaysOne(Always):
    always = 1


class Slower(PipelineTuner):
    """Broken: keeps what took longer."""

    def ended(self, seconds: float | None) -> None:
        super().ended(None if seconds is None else -seconds)


def check_choices(rule: type[PipelineTuner]) -> None:
    """At most 1 % longer than one after the other, and no more than 1 % of what two at once save is lost.

    Steps differ by a fifth of a percent, become longer by and by, and one of them is held up for long.
    """
    for case in CASES:
        random = Random(repr(case))
        hiccup = random.randrange(FIRST)

        def seconds(
            number: int, window: int, case: Case = case, random: Random = random, hiccup: int = hiccup
        ) -> float:
            noise = 1 + 0.002 * random.random() + 0.001 * number + 9.0 * (number == hiccup)
            return step_seconds(case, window) * noise

        kept = windows([rule()], FIRST + 1, seconds)[-1]
        assert step_seconds(case, kept) <= 1.01 * min(step_seconds(case, 1), step_seconds(case, DEPTH)), case


def test_what_is_kept_after_a_trial_is_no_loss() -> None:
    check_choices(PipelineTuner)


@pytest.mark.parametrize("rule", [Always, AlwaysOne, Slower])
def test_rules_that_lose_are_noticed(rule: type[PipelineTuner]) -> None:
    with pytest.raises(AssertionError):
        check_choices(rule)


def test_a_hiccup_would_spoil_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "median", fmean)
    with pytest.raises(AssertionError):
        check_choices(PipelineTuner)


def check_drift() -> None:
    """Steps become longer by a tenth each time: what is faster by a twentieth is kept all the same."""
    for faster in (1, DEPTH):
        kept = windows(
            [PipelineTuner()], FIRST + 1, lambda number, w, f=faster: (1.0 if w == f else 1.05) + 0.1 * number
        )
        assert kept[-1] == faster


def test_a_drift_favours_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drift()
    monkeypatch.setattr(pipeline, "TRIAL_DEPTHS", (1, 1, 1, 1, 2, 2, 2, 2))
    with pytest.raises(AssertionError):
        check_drift()


# -- in rounds ---------------------------------------------------------------------------------------------------------


def cargo(rank: int) -> list[Bucket]:
    """Three, with small integers."""
    found = []
    for number in range(3):
        bucket = Bucket(
            {f"{number}": torch.nn.Parameter(torch.empty(10, 12 + number))}, PowerSGD(rank=2), AggregationContext()
        )
        bucket.flat.copy_(torch.arange(bucket.flat.numel()) % (5 + rank + number))
        found.append(bucket)
    return found


def closing(presence: Presence) -> StepTrailer:
    nothing = np.zeros(0, dtype=bool)
    report = StepReport(
        weight=1.0,
        presence=presence,
        settings=0,
        steps=0,
        sample=0,
        used=nothing,
        moved=nothing,
    )
    return StepTrailer(report=report, settings="", check=UNCHECKED, buffers=())


def exchanged(
    monkeypatch: pytest.MonkeyPatch,
    tuner: Callable[[], PipelineTuner | None],
    *,
    slow: Callable[[int, int], float] = lambda rank, window: 1.0,
    presence: Sequence[Presence] = (Presence.TRAINING,) * 2,
) -> list[tuple[list[int], torch.Tensor]]:
    """By rank: the windows of rounds that take slow(rank, window) seconds, and what all of them came to."""
    monkeypatch.setattr("gossamer.train.engine.bucket_reduction.time", SimpleNamespace(perf_counter=lambda: 0.0))
    group = SimulatedGroup(2)

    def work(rank: int) -> tuple[list[int], torch.Tensor]:
        tried, buckets, found = tuner(), cargo(rank), []
        for number in range(FIRST + 2):
            at = AggregationContext(step=number, rank=rank, world=2)
            round_ = StepReduction(PowerSGD(rank=2), group.transports[rank], list("012"), at, 1.0, 1.0, tuner=tried)
            found.append(round_._pipeline._window)
            round_._began -= slow(rank, found[-1])
            *before, last = buckets
            for each in before:
                round_.exchange(each, NO_INPUT, 1.0)
            round_.close(last, NO_INPUT, 1.0, closing(presence[rank]))
            for each, staged in zip(buckets, round_.staged, strict=True):
                each.flat.add_(staged.mean)
                each.state = staged.next_state.after(each.state)
        return found, torch.cat([each.flat for each in buckets])

    return in_threads(work, 2)


def test_rounds_try_both_and_come_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 two at once take much longer, on rank 0 a little less."""
    tried = exchanged(monkeypatch, PipelineTuner, slow=lambda rank, window: 1.0 + (window == DEPTH) * (9 * rank - 0.5))
    untried = exchanged(monkeypatch, lambda: None)
    assert [windows for windows, _ in tried] == [[2, 2, 2, 1, 2, 2, 1, 1, 2, 2, 1, 1, 1]] * 2
    assert [windows for windows, _ in untried] == [[2] * 13] * 2
    for (_, one), (_, other) in zip(tried, untried, strict=True):
        assert torch.equal(one, other)


def test_a_peer_that_keeps_others_company_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(rank: int, window: int) -> float:
        return 1.0 + (window == DEPTH) * (9 * rank - 0.5)

    found = exchanged(monkeypatch, PipelineTuner, slow=slow, presence=(Presence.TRAINING, Presence.OUT_OF_DATA))
    assert [windows[-1] for windows, _ in found] == [DEPTH, DEPTH]

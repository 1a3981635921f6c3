"""Whole advice: gathers what was foretold, raced and answered into one record, for its file and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite

from gossamer.plan.advise.advice_file import (
    MOST_POINTS,
    Advice,
    CandidateRow,
    ConfirmedRow,
    ContenderRow,
    FindingRow,
    Range,
    RungRow,
)
from gossamer.plan.advise.answer import Answer, Setting
from gossamer.plan.advise.pricing.gradient_findings import GradientFinding
from gossamer.plan.advise.racing.batch_means import ConfidenceInterval
from gossamer.plan.advise.racing.contender import Contender
from gossamer.plan.advise.racing.race import RaceResult
from gossamer.plan.advise.racing.target import Target, seconds_to


def whole_advice(
    race: RaceResult,
    answer: Answer,
    setting: Setting,
    *,
    candidates: Sequence[CandidateRow] = (),
    compute_seconds: float = 0.0,
    gradients: Mapping[str, float | None] | None = None,
    findings: Sequence[GradientFinding] = (),
    confirmed: Sequence[ConfirmedRow] = (),
) -> Advice:
    """candidates: in the order of what is expected of them. compute_seconds: of a step without communication."""
    return Advice(
        recipe=answer.recipe,
        learning_rate_factor=answer.learning_rate_factor,
        change=answer.change,
        use=answer.use,
        gain=answer.gain,
        cost=answer.cost,
        command=answer.command,
        script=setting.script,
        arguments=tuple(setting.arguments),
        workers=setting.workers,
        network=setting.network,
        target=str(setting.target) if setting.target else None,
        compute_seconds=compute_seconds,
        metric=race.metric,
        race_seconds=race.seconds,
        confidence=race.confidence,
        candidates=tuple(candidates),
        contenders=tuple(_contender_row(each, race, setting.target) for each in race.contenders),
        rungs=tuple(RungRow(seconds=each.seconds, names=each.names, out=each.out) for each in race.rungs),
        would_change=answer.would_change,
        remarks=answer.remarks,
        gradients=dict(gradients or {}),
        findings=tuple(FindingRow(**asdict(each)) for each in findings),
        confirmed=tuple(confirmed),
    )


def _contender_row(contender: Contender, race: RaceResult, target: Target | None) -> ContenderRow:
    against = contender.against
    curve = contender.curve(race.metric).thinned(MOST_POINTS)
    return ContenderRow(
        recipe=contender.recipe,
        learning_rate_factor=contender.learning_rate_factor,
        steps=contender.steps,
        seconds=contender.seconds,
        bytes_sent=contender.bytes_sent,
        loss=race.last_loss(contender),
        curve=tuple((float(step), at, value) for step, at, value in curve.points),
        out=contender.out,
        speedup=_range(against.speedup) if against else None,
        loss_at_equal_steps=_range(against.loss_at_equal_steps) if against else None,
        loss_at_equal_seconds=_range(against.loss_at_equal_seconds) if against else None,
        seconds_to_target=seconds_to(contender.curve(target.metric), target) if target else None,
    )


def _range(interval: ConfidenceInterval) -> Range:
    value, low, high = (each if isfinite(each) else None for each in (interval.value, interval.low, interval.high))
    return value, low, high
